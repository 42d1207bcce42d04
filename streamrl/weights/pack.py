"""Trainer's side of weight sync: pack named tensors into buckets and build the manifest.

Everything streams: this module holds the copy of a single bucket, and the caller may gather
parameters one by one and free each before the next.
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
from streamrl.weights.transport import TransportWriter

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def allocate_host_buffer(num_bytes: int) -> Array:
    """Return zeroed memory for a bucket. Pages are committed only as the bucket is filled."""
    return np.zeros(num_bytes, np.uint8)


def pack_buckets(
    named_tensors: NamedTensors,
    *,
    version: int,
    bucket_bytes: int,
    allocate: Callable[[int], Array] = allocate_host_buffer,
) -> Iterator[tuple[WeightBucket, Array]]:
    """Yield each bucket of a version with its bytes, uint8 [num_bytes].

    `bucket_bytes`: largest size of a bucket. `allocate` returns memory for at least the given
    number of bytes, with any contents: the gaps between tensors, which the checksum covers, are
    zeroed here.

    A tensor may live on any device and need not be contiguous; it is read before the next tensor is
    requested. Raises WeightsError on a duplicate name, a tensor without elements (a parameter that
    was not gathered) or an unsupported dtype.
    """
    allocator = SlotAllocator(bucket_bytes)
    names: set[str] = set()
    slots: list[TensorSlot] = []
    data = np.empty(0, np.uint8)
    bucket_index = 0
    with RunningChecksum() as checksum:
        for name, tensor in named_tensors:
            spec = _describe_tensor(name, tensor, version)
            if name in names:
                raise WeightsError(f"weights version {version}: duplicate tensor {name}")
            names.add(name)
            index, slot = allocator.place_tensor(spec)
            if index > bucket_index:
                yield _finish_bucket(slots, data, checksum)
                slots, bucket_index = [], index
            if not slots:
                data = allocate(max(bucket_bytes, slot.end))
            data[slots[-1].end if slots else 0 : slot.offset] = 0
            _copy_to_slot(tensor.detach(), slot, data, checksum)
            slots.append(slot)
        if slots:
            yield _finish_bucket(slots, data, checksum)


def _copy_to_slot(
    tensor: torch.Tensor, slot: TensorSlot, data: Array, checksum: RunningChecksum
) -> None:
    """Copy a tensor into its slot, in pieces if it is large, so that hashing runs in parallel."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        view_tensor(data, slot).copy_(tensor)
        checksum.hash_written(data, slot.end)
        return
    # Copy with numpy, single-threaded: torch's parallel copy would wait for the core that hashes.
    source = tensor.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, slot.num_bytes, HASH_CHUNK_BYTES):
        piece = source[start : start + HASH_CHUNK_BYTES]
        end = slot.offset + start + piece.nbytes
        data[end - piece.nbytes : end] = piece
        checksum.hash_written(data, end)


def publish_version(
    named_tensors: NamedTensors, *, version: int, bucket_bytes: int, writer: TransportWriter
) -> WeightManifest:
    """Pack the tensors, send every bucket through `writer`, and return the manifest for readers.

    `bucket_bytes`: largest size of a bucket. Raises the errors of `pack_buckets`; readers then
    never see the version.
    """
    writer.begin_version(version)
    buckets: list[WeightBucket] = []
    handles: list[Any] = []
    for bucket, data in pack_buckets(
        named_tensors, version=version, bucket_bytes=bucket_bytes, allocate=writer.allocate_buffer
    ):
        buckets.append(bucket)
        handles.append(writer.commit_bucket(bucket, data))
        del data  # otherwise the loop variable keeps the bucket alive while the next one is filled
    manifest = WeightManifest(version, tuple(buckets), tuple(handles))
    writer.commit_version(manifest)
    return manifest


def _describe_tensor(name: str, tensor: torch.Tensor, version: int) -> TensorMetadata:
    """Return a tensor's metadata; raise WeightsError if the tensor cannot be published."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in TORCH_DTYPES:
        raise WeightsError(f"weights version {version}: {name} has unsupported dtype {dtype}")
    if tensor.numel() == 0:
        raise WeightsError(
            f"weights version {version}: {name} has no elements, shape {tuple(tensor.shape)}: "
            "was the parameter gathered?"
        )
    return TensorMetadata(name, dtype, tuple(tensor.shape))


def _finish_bucket(
    slots: list[TensorSlot], data: Array, checksum: RunningChecksum
) -> tuple[WeightBucket, Array]:
    """Return the description of a filled bucket, with its checksum, and its bytes."""
    data = data[: slots[-1].end]
    return WeightBucket(tuple(slots), data.nbytes, checksum.finish_bucket(data)), data
