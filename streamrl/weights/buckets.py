"""Buckets of a version: their memory and checksums; packing, verifying and viewing their tensors.

Everything streams: packing holds the copy of a single bucket, and the caller may gather parameters
one by one and free each before the next. Threads hash written chunks while the caller copies the
next ones; XXH3 releases the GIL, so hashing on other cores is nearly free. A bucket's checksum is
the hash of its chunks' hashes: with a GPU, which copies faster than one thread hashes, several
threads share a bucket.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.parameters import as_tensor
from streamrl.weights.rank_slices import RankSlices
from streamrl.weights.transport import TransportWriter
from streamrl.weights.versions import TensorSlot, WeightBucket, WeightManifest

NamedTensors = Iterable[tuple[str, torch.Tensor]]
TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""Supported dtypes by name. Manifests store names because numpy has no bfloat16."""
ALIGNMENT_BYTES = 64
"""Tensors start at multiples of this, so that any dtype can be viewed in place."""
HASH_CHUNK_BYTES = 4 << 20
"""Bytes hashed per task of the thread pool; submitting a task costs as much as hashing 0.5 MB."""
NUM_HASH_THREADS = min(4, os.cpu_count() or 1)
"""Memory bandwidth is the limit beyond four threads."""


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

    `bucket_bytes`: largest size of a bucket; a larger tensor gets a bucket of its own. `allocate`
    returns memory for at least the given number of bytes, with any contents: the gaps between
    tensors, which the checksum covers, are zeroed here.

    A tensor may live on any device and need not be contiguous; it is read before the next tensor is
    requested. Raises WeightsError on a duplicate name, a tensor without elements (a parameter that
    was not gathered) or an unsupported dtype.
    """
    names: set[str] = set()
    slots: list[TensorSlot] = []
    end = 0
    data: Array = np.empty(0, np.uint8)
    with ThreadPoolExecutor(NUM_HASH_THREADS, "checksum") as threads:
        checksum = RunningChecksum(threads)
        for name, tensor in named_tensors:
            if name in names:
                raise WeightsError(f"weights version {version}: duplicate tensor {name}")
            names.add(name)
            dtype = _get_dtype_name(name, tensor, version)
            offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if slots and offset + tensor.nbytes > bucket_bytes:
                yield _finish_bucket(slots, data, checksum)
                slots, end, offset = [], 0, 0
            slot = TensorSlot(name, dtype, tuple(tensor.shape), offset, tensor.nbytes)
            if not slots:
                data = allocate(max(bucket_bytes, slot.end))
            data[end:offset] = 0
            _copy_to_slot(tensor.detach(), slot, data, checksum)
            slots.append(slot)
            end = slot.end
        if slots:
            yield _finish_bucket(slots, data, checksum)


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
    return replace(manifest, rank_manifests=writer.rank_manifests)


class RunningChecksum:
    """Checksum of a bucket that is being filled front to back, computed on `threads`.

    Bytes reported to `hash_written` must not change until `finish_bucket` returns.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._digests: list[Future[bytes]] = []

    def hash_written(self, data: Array, end: int) -> None:
        """Hash the new whole chunks in other threads; the first `end` bytes are final now.

        `data`: memory of the bucket, uint8.
        """
        while (start := len(self._digests) * HASH_CHUNK_BYTES) + HASH_CHUNK_BYTES <= end:
            chunk = data[start : start + HASH_CHUNK_BYTES]
            self._digests.append(self._threads.submit(hash_chunk, chunk))

    def finish_bucket(self, data: Array) -> str:
        """Return the checksum of the complete bucket `data`, and reset for the next bucket."""
        digests, self._digests = self._digests, []
        rest = map(hash_chunk, split_chunks(data[len(digests) * HASH_CHUNK_BYTES :]))
        return combine_digests([*(digest.result() for digest in digests), *rest])


def _get_dtype_name(name: str, tensor: torch.Tensor, version: int) -> str:
    """Return a tensor's dtype; raise WeightsError if the tensor cannot be published."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in TORCH_DTYPES:
        raise WeightsError(f"weights version {version}: {name} has unsupported dtype {dtype}")
    if tensor.numel() == 0:
        raise WeightsError(
            f"weights version {version}: {name} has no elements, shape {tuple(tensor.shape)}: "
            "was the parameter gathered?"
        )
    return dtype


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


def _finish_bucket(
    slots: list[TensorSlot], data: Array, checksum: RunningChecksum
) -> tuple[WeightBucket, Array]:
    """Return the description of a filled bucket, with its checksum, and its bytes."""
    data = data[: slots[-1].end]
    return WeightBucket(tuple(slots), data.nbytes, checksum.finish_bucket(data)), data


def unpack_tensors(manifest: WeightManifest, arrays: Sequence[Array]) -> dict[str, torch.Tensor]:
    """Verify the buckets of a version, and return its tensors by name as views of the buckets.

    `arrays`: bytes of each bucket, uint8 [num_bytes]. The views are
    read-only if the arrays are, which torch cannot enforce: copy before writing. Raises
    WeightsError with version, bucket and reason if the number of buckets, a size or a checksum is
    wrong, or a bucket does not contain its tensors.
    """
    num_buckets = len(manifest.buckets)
    if len(arrays) != num_buckets:
        raise WeightsError(
            f"weights version {manifest.version}: received {len(arrays)} buckets,"
            f" expected {num_buckets}"
        )
    faults = map(_find_fault, manifest.buckets, arrays, compute_checksums(arrays))
    for index, fault in enumerate(faults):
        if fault:
            location = f"weights version {manifest.version}, bucket {index} of {num_buckets}"
            raise WeightsError(f"{location}: {fault}")
    return view_tensors(manifest, arrays)


def _find_fault(bucket: WeightBucket, data: Array, checksum: str) -> str | None:
    """Return why the dtype, size, slots or checksum of a bucket are wrong, or None."""
    if data.dtype != np.uint8 or data.shape != (bucket.num_bytes,):
        return f"is {data.dtype}{list(data.shape)}, expected uint8[{bucket.num_bytes}]"
    for slot in bucket.slots:
        if slot.end > bucket.num_bytes:
            return f"{slot.name} ends at byte {slot.end}, the bucket at {bucket.num_bytes}"
    if checksum == bucket.checksum:
        return None
    return f"checksum is {checksum}, expected {bucket.checksum}"


def unpack_slices(manifest: WeightManifest, rank_arrays: Sequence[Sequence[Array]]) -> RankSlices:
    """Verify the buckets of each rank, as `unpack_tensors` does; return the slices of all ranks."""
    slices = RankSlices()
    pairs = zip(manifest.rank_manifests, rank_arrays, strict=True)
    for rank, (rank_manifest, arrays) in enumerate(pairs):
        try:
            own = unpack_tensors(rank_manifest, arrays)
        except WeightsError as error:
            raise WeightsError(f"slices of rank {rank}: {error}") from error
        for name, checksum in rank_manifest.slice_checksums.items():
            if name not in own or compute_tensor_checksum(own[name]) != checksum:
                raise WeightsError(f"slices of rank {rank}: {name} is not what was published")
        slices |= own
    return slices


def compute_tensor_checksum(tensor: torch.Tensor) -> str:
    data: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return compute_checksums([data])[0]


def view_tensors(manifest: WeightManifest, arrays: Iterable[Array]) -> dict[str, torch.Tensor]:
    """Return the tensors of a version by name, as views of its buckets."""
    return {
        slot.name: view_tensor(data, slot)
        for bucket, data in zip(manifest.buckets, arrays, strict=False)
        for slot in bucket.slots
    }


def view_tensor(data: Array, slot: TensorSlot) -> torch.Tensor:
    """Return the tensor of a slot as a view of its bucket's bytes; `data` may be read-only."""
    raw = as_tensor(data[slot.offset : slot.end])
    return raw.view(TORCH_DTYPES[slot.dtype]).view(slot.shape)


def compute_checksums(arrays: Sequence[Array]) -> list[str]:
    """Return the checksum of each array, as `RunningChecksum` does. Several threads hash."""
    with ThreadPoolExecutor(NUM_HASH_THREADS, "checksum") as threads:
        digests = [threads.map(hash_chunk, split_chunks(array)) for array in arrays]
        return list(map(combine_digests, digests))


def split_chunks(data: Array) -> list[Array]:
    return [
        data[start : start + HASH_CHUNK_BYTES] for start in range(0, data.nbytes, HASH_CHUNK_BYTES)
    ]


def hash_chunk(chunk: Array) -> bytes:
    """Return the XXH3 hash (64 bits) of a contiguous array's bytes."""
    return xxhash.xxh3_64_digest(chunk.data)


def combine_digests(digests: Iterable[bytes]) -> str:
    """Return the checksum (hex) of the bytes whose chunks have these hashes, in order."""
    return xxhash.xxh3_64_hexdigest(b"".join(digests))
