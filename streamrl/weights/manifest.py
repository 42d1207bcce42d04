"""Which tensor lies where in which bucket: the table of contents of one version of the weights.

Pure data and arithmetic. A bucket is a run of bytes that travels as one object, large enough that
the cost per object is small and small enough that a copy of it fits anywhere. The bytes of a
manifest are counted before anything moves.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from streamrl.messages import Array
from streamrl.weights.logprob_probe import LogprobCheck

#: A tensor starts at a multiple of this, so that any dtype can be viewed in place.
ALIGNMENT_BYTES = 64

DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Bytes of an element of what can travel, by its name in torch."""


@dataclass(frozen=True)
class TensorMetadata:
    """Name, dtype (a key of ITEMSIZES) and shape of a tensor that has no place yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorSlot:
    """A tensor and the place of its `num_bytes` bytes: `offset` bytes into its bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first byte after the tensor."""
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class WeightBucket:
    """One run of bytes: the slots in it, its size and the checksum of all of it; gaps are zeros."""

    slots: tuple[TensorSlot, ...]
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class WeightManifest:
    """One version of the weights: its buckets and, one for each, the handle to fetch it by.

    `probe` is there if those who take it up are to compare themselves with the trainer.
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
        """Bytes one pull of this version moves."""
        return sum(bucket.num_bytes for bucket in self.buckets)


class SlotAllocator:
    """Gives tensors their places one at a time, in the order they come, never looking back."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bucket_index = 0
        self._end_offset = 0

    def place_tensor(self, spec: TensorMetadata) -> tuple[int, TensorSlot]:
        """The bucket (counted from 0) and the slot of the next tensor."""
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
    """The slots of every bucket for tensors in this order; a bucket has at most `max_bytes`.

    A tensor larger than that gets a bucket of its own.
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
    """XXH3 (64 bits, hex) of a contiguous array's bytes."""
    return xxhash.xxh3_64_hexdigest(data.data)
