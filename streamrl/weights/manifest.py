"""Manifest of a version: which tensor lies at which bytes of which bucket.

Pure data and arithmetic. A bucket is a run of bytes that travels as one object: large enough to
amortize the cost per object, small enough that a copy fits anywhere. All sizes are known before any
transfer.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from streamrl.messages import Array
from streamrl.weights.logprob_probe import LogprobCheck

#: Tensors start at multiples of this, so that any dtype can be viewed in place.
ALIGNMENT_BYTES = 64

DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Element size of each supported dtype, by its torch name."""


@dataclass(frozen=True)
class TensorMetadata:
    """Name, dtype (a key of DTYPE_BYTES) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorSlot:
    """Place of a tensor in a bucket: `num_bytes` bytes from byte `offset` on; and its metadata."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """First byte after the tensor."""
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class WeightBucket:
    """Contents of a bucket: its tensors' slots, its size, and the checksum of all its bytes.

    Gaps between slots are zeros.
    """

    slots: tuple[TensorSlot, ...]
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class WeightManifest:
    """Buckets of a version and, for each bucket, the transport's handle by which readers fetch it.

    If `logprob_check` is set, followers compare their log-probabilities with the trainer's.
    """

    version: int
    buckets: tuple[WeightBucket, ...]
    handles: tuple[Any, ...]
    logprob_check: LogprobCheck | None = None

    def __post_init__(self) -> None:
        if len(self.handles) != len(self.buckets):
            raise ValueError(f"{len(self.handles)} handles for {len(self.buckets)} buckets")

    @property
    def num_bytes(self) -> int:
        """Bytes that one pull of this version moves."""
        return sum(bucket.num_bytes for bucket in self.buckets)


class SlotAllocator:
    """Assigns each tensor, in order of arrival, a place in a bucket of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bucket_index = 0
        self._end_offset = 0

    def place_tensor(self, spec: TensorMetadata) -> tuple[int, TensorSlot]:
        """Return the index (from 0) of the next tensor's bucket, and its slot in the bucket."""
        offset = -(-self._end_offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._end_offset and offset + spec.num_bytes > self._max_bytes:
            self._bucket_index += 1
            offset = 0
        slot = TensorSlot(spec.name, spec.dtype, spec.shape, offset, spec.num_bytes)
        self._end_offset = slot.end
        return self._bucket_index, slot


def plan_buckets(
    specs: Iterable[TensorMetadata], *, max_bytes: int
) -> tuple[tuple[TensorSlot, ...], ...]:
    """Divide tensors in order into buckets of at most `max_bytes`; return each bucket's slots.

    A larger tensor gets a bucket of its own.
    """
    allocator = SlotAllocator(max_bytes)
    buckets: list[list[TensorSlot]] = []
    for spec in specs:
        index, slot = allocator.place_tensor(spec)
        if index == len(buckets):
            buckets.append([])
        buckets[index].append(slot)
    return tuple(tuple(slots) for slots in buckets)


def compute_checksum(data: Array) -> str:
    """Return the XXH3 hash (64 bits, hex) of a contiguous array's bytes."""
    return xxhash.xxh3_64_hexdigest(data.data)
