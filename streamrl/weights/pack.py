"""The trainer's side: named tensors in, buckets and a manifest out.

Everything streams. The tensors may be gathered one by one and gone when the next is asked for, and
no more than one bucket's copy is held here.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.checksum import PIECE_BYTES, RunningChecksum
from streamrl.weights.manifest import Bucket, SlotAllocator, TensorSlot, TensorSpec, WeightManifest
from streamrl.weights.tensor_views import DTYPES, tensor_view
from streamrl.weights.transport_protocol import Outlet

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def own_room(num_bytes: int) -> Array:
    """Memory for a bucket. Its pages are touched where the bucket is filled, and no others."""
    return np.zeros(num_bytes, np.uint8)


def pack(
    named_tensors: NamedTensors,
    *,
    version: int,
    bucket_bytes: int,
    room: Callable[[int], Array] = own_room,
) -> Iterator[tuple[Bucket, Array]]:
    """The tensors of a version laid into buckets: each bucket with its bytes, uint8 [num_bytes].

    `room` gives the memory for one of so many bytes at most, whatever is in it: the gaps between
    tensors, part of the checksum, are laid with zeros.

    A tensor may live on any device and need not be contiguous; it is read before the next one is
    asked for. Raises WeightsError on a name that comes twice, a tensor without elements (a
    parameter that was not gathered) or a dtype that cannot travel.
    """
    allocator = SlotAllocator(bucket_bytes)
    seen: set[str] = set()
    slots: list[TensorSlot] = []
    data = np.empty(0, np.uint8)
    current = 0
    with RunningChecksum() as running:
        for name, tensor in named_tensors:
            spec = _spec(name, tensor, version)
            if name in seen:
                raise WeightsError(f"weights version {version}: tensor {name} comes twice")
            seen.add(name)
            index, slot = allocator.place(spec)
            if index > current:
                yield _seal(slots, data, running)
                slots, current = [], index
            if not slots:
                data = room(max(bucket_bytes, slot.end))
            data[slots[-1].end if slots else 0 : slot.offset] = 0
            _lay(tensor.detach(), slot, data, running)
            slots.append(slot)
        if slots:
            yield _seal(slots, data, running)


def _lay(tensor: torch.Tensor, slot: TensorSlot, data: Array, running: RunningChecksum) -> None:
    """Copy a tensor into its slot, a large one in pieces, so that hashing need not wait for all."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor_view(data, slot).copy_(tensor)
        running.laid(data, slot.end)
        return
    # By one thread: torch's own would wait for the core that hashes.
    source = tensor.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, slot.num_bytes, PIECE_BYTES):
        piece = source[start : start + PIECE_BYTES]
        end = slot.offset + start + piece.nbytes
        data[end - piece.nbytes : end] = piece
        running.laid(data, end)


def publish(
    named_tensors: NamedTensors, *, version: int, bucket_bytes: int, outlet: Outlet
) -> WeightManifest:
    """Pack the tensors and send each bucket off; the manifest is what readers fetch them by.

    Raises what `pack` raises; the version does not exist then.
    """
    outlet.begin(version)
    buckets: list[Bucket] = []
    handles: list[Any] = []
    for bucket, data in pack(
        named_tensors, version=version, bucket_bytes=bucket_bytes, room=outlet.room
    ):
        buckets.append(bucket)
        handles.append(outlet.seal(bucket, data))
        del data  # else it would live on while the next bucket is filled
    manifest = WeightManifest(version, tuple(buckets), tuple(handles))
    outlet.finish(manifest)
    return manifest


def _spec(name: str, tensor: torch.Tensor, version: int) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightsError(f"weights version {version}: {name} has dtype {dtype}: cannot travel")
    if tensor.numel() == 0:
        raise WeightsError(
            f"weights version {version}: {name} has no elements {tuple(tensor.shape)}: "
            "was it gathered?"
        )
    return TensorSpec(name, dtype, tuple(tensor.shape))


def _seal(slots: list[TensorSlot], data: Array, running: RunningChecksum) -> tuple[Bucket, Array]:
    data = data[: slots[-1].end]
    return Bucket(tuple(slots), data.nbytes, running.finish(data)), data
