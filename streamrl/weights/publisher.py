"""The trainer's side: named tensors in, buckets and a manifest out.

Everything streams. The tensors may be gathered one by one and gone when the next is asked for, and
no more than one bucket's copy is held here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streamrl.errors import ConfigError, WeightsError
from streamrl.messages import Array
from streamrl.weights.manifest import (
    DTYPES,
    Bucket,
    SlotAllocator,
    TensorSlot,
    TensorSpec,
    WeightManifest,
    checksum,
    tensor_view,
)

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass
class WeightsConfig:
    """How versions of the weights travel."""

    #: Size of a bucket, MB. A larger tensor gets a bucket of its own.
    bucket_mb: int = 64
    #: How many of the newest versions the publisher keeps for those who are still pulling.
    keep_versions: int = 2

    def __post_init__(self) -> None:
        if self.bucket_mb <= 0:
            raise ConfigError(f"weights.bucket_mb={self.bucket_mb}: must be positive")
        if self.keep_versions < 1:
            raise ConfigError(f"weights.keep_versions={self.keep_versions}: must be at least 1")

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes."""
        return self.bucket_mb << 20


def pack(
    named_tensors: NamedTensors, *, version: int, bucket_bytes: int
) -> Iterator[tuple[Bucket, Array]]:
    """The tensors of a version laid into buckets: each bucket with its bytes, uint8 [num_bytes].

    A tensor may live on any device and need not be contiguous; it is read before the next one is
    asked for. Raises WeightsError on a name that comes twice, a tensor without elements (a
    parameter that was not gathered) or a dtype that cannot travel.
    """
    allocator = SlotAllocator(bucket_bytes)
    seen: set[str] = set()
    slots: list[TensorSlot] = []
    data = np.empty(0, np.uint8)
    current = 0
    for name, tensor in named_tensors:
        spec = _spec(name, tensor, version)
        if name in seen:
            raise WeightsError(f"weights version {version}: tensor {name} comes twice")
        seen.add(name)
        index, slot = allocator.place(spec)
        if index > current:
            yield _seal(slots, data)
            slots, current = [], index
        if not slots:
            # Zeros, because the gaps between tensors are part of the checksum. The pages of a
            # bucket that stays small are never touched.
            data = np.zeros(max(bucket_bytes, slot.end), np.uint8)
        tensor_view(data, slot).copy_(tensor.detach())
        slots.append(slot)
    if slots:
        yield _seal(slots, data)


def publish(
    named_tensors: NamedTensors,
    *,
    version: int,
    bucket_bytes: int,
    put: Callable[[Array], Any],
) -> WeightManifest:
    """Pack the tensors and hand each bucket to `put`, whose answers are the manifest's handles.

    `put` must have copied the bytes, or own them, when it returns. Raises what `pack` raises.
    """
    buckets: list[Bucket] = []
    handles: list[Any] = []
    for bucket, data in pack(named_tensors, version=version, bucket_bytes=bucket_bytes):
        buckets.append(bucket)
        handles.append(put(data))
        del data  # else it would live on while the next bucket is filled
    return WeightManifest(version, tuple(buckets), tuple(handles))


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


def _seal(slots: list[TensorSlot], data: Array) -> tuple[Bucket, Array]:
    data = data[: slots[-1].end]
    return Bucket(tuple(slots), data.nbytes, checksum(data)), data
