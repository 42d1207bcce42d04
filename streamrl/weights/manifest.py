"""Manifest of a version: which tensor lies at which bytes of which bucket.

A bucket is a run of bytes that travels as one object: large enough to
amortize the cost per object, small enough that a copy fits anywhere. All sizes are known before any
transfer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from streamrl.messages import Array
from streamrl.weights.logprob_check import LogprobCheck

if TYPE_CHECKING:
    import torch

BucketMemory: TypeAlias = "Array | torch.Tensor"
"""Memory of a bucket, uint8 [num_bytes]: a numpy array on the host, or a tensor on a device."""
DTYPE_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Element size of each supported dtype, by its torch name."""


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


def compute_checksum(data: Array) -> str:
    """Return the XXH3 hash (64 bits, hex) of a contiguous array's bytes."""
    return xxhash.xxh3_64_hexdigest(data.data)
