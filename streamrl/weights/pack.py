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
from streamrl.weights.checksum import HASH_CHUNK_BYTES, RunningChecksum
from streamrl.weights.manifest import (
    SlotAllocator,
    TensorMetadata,
    TensorSlot,
    WeightBucket,
    WeightManifest,
)
from streamrl.weights.tensor_views import TORCH_DTYPES, view_tensor
from streamrl.weights.transport_protocol import TransportWriter

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def allocate_host_buffer(num_bytes: int) -> Array:
    """Memory for a bucket. Its pages are touched where the bucket is filled, and no others."""
    return np.zeros(num_bytes, np.uint8)


def pack_buckets(
    named_tensors: NamedTensors,
    *,
    version: int,
    bucket_bytes: int,
    room: Callable[[int], Array] = allocate_host_buffer,
) -> Iterator[tuple[WeightBucket, Array]]:
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
            spec = _describe_tensor(name, tensor, version)
            if name in seen:
                raise WeightsError(f"weights version {version}: tensor {name} comes twice")
            seen.add(name)
            index, slot = allocator.place_tensor(spec)
            if index > current:
                yield _finish_bucket(slots, data, running)
                slots, current = [], index
            if not slots:
                data = room(max(bucket_bytes, slot.end))
            data[slots[-1].end if slots else 0 : slot.offset] = 0
            _copy_to_slot(tensor.detach(), slot, data, running)
            slots.append(slot)
        if slots:
            yield _finish_bucket(slots, data, running)


def _copy_to_slot(
    tensor: torch.Tensor, slot: TensorSlot, data: Array, running: RunningChecksum
) -> None:
    """Copy a tensor into its slot, a large one in pieces, so that hashing need not wait for all."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        view_tensor(data, slot).copy_(tensor)
        running.hash_written(data, slot.end)
        return
    # By one thread: torch's own would wait for the core that hashes.
    source = tensor.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, slot.num_bytes, HASH_CHUNK_BYTES):
        piece = source[start : start + HASH_CHUNK_BYTES]
        end = slot.offset + start + piece.nbytes
        data[end - piece.nbytes : end] = piece
        running.hash_written(data, end)


def publish_version(
    named_tensors: NamedTensors, *, version: int, bucket_bytes: int, outlet: TransportWriter
) -> WeightManifest:
    """Pack the tensors and send each bucket off; the manifest is what readers fetch them by.

    Raises what `pack` raises; the version does not exist then.
    """
    outlet.begin_version(version)
    buckets: list[WeightBucket] = []
    handles: list[Any] = []
    for bucket, data in pack_buckets(
        named_tensors, version=version, bucket_bytes=bucket_bytes, room=outlet.allocate_buffer
    ):
        buckets.append(bucket)
        handles.append(outlet.commit_bucket(bucket, data))
        del data  # else it would live on while the next bucket is filled
    manifest = WeightManifest(version, tuple(buckets), tuple(handles))
    outlet.commit_version(manifest)
    return manifest


def _describe_tensor(name: str, tensor: torch.Tensor, version: int) -> TensorMetadata:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in TORCH_DTYPES:
        raise WeightsError(f"weights version {version}: {name} has dtype {dtype}: cannot travel")
    if tensor.numel() == 0:
        raise WeightsError(
            f"weights version {version}: {name} has no elements {tuple(tensor.shape)}: "
            "was it gathered?"
        )
    return TensorMetadata(name, dtype, tuple(tensor.shape))


def _finish_bucket(
    slots: list[TensorSlot], data: Array, running: RunningChecksum
) -> tuple[WeightBucket, Array]:
    data = data[: slots[-1].end]
    return WeightBucket(tuple(slots), data.nbytes, running.finish_bucket(data)), data
