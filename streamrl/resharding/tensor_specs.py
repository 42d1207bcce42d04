"""What a model's tensors are to the resharding engine: shapes, how each may be split, and where.

A transformer is a row of places: 0 is the embedding's, 1 to L those of its L layers, L + 1 the
head's. A pipeline stage holds a run of places, and a tensor lies in every stage that holds one of
its places: a tied embedding has two, the first and the last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamrl.resharding.boxes import TensorBox

ITEMSIZES = (1, 2, 4, 8, 16)
"""Bytes of an element."""


@dataclass(frozen=True)
class FusedComponent:
    """One of the matrices that are fused into a tensor, one behind the other in `split_dim`.

    size: its elements in that dimension. units: what it must not be split below, as the heads of
    an attention: with more ranks than units, ranks hold the same unit. None splits anywhere.
    """

    size: int
    num_units: int | None = None

    def __post_init__(self) -> None:
        units = 1 if self.num_units is None else self.num_units
        if self.size < 1 or units < 1 or self.size % units:
            raise ValueError(
                f"component of size {self.size}: must be a multiple of {self.num_units}"
            )

    def get_split_range(self, index: int, count: int) -> tuple[int, int]:
        """Start and stop of rank `index` of `count`, within the component.

        Raises ValueError where it cannot be split so evenly.
        """
        units = self.size if self.num_units is None else self.num_units
        unit = self.size // units
        if units % count == 0:
            share = units // count * unit
            return index * share, (index + 1) * share
        if self.num_units is not None and count % units == 0:
            first = index * units // count * unit
            return first, first + unit
        raise ValueError(f"{units} do not divide among {count}")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model, unsplit.

    places: where in the row of places it is needed. split_dim: the dimension that tensor
    parallelism splits, None where every rank holds all of it. components: what is fused in that
    dimension, in order; empty is one component.
    """

    name: str
    shape: tuple[int, ...]
    pipeline_positions: tuple[int, ...]
    split_dim: int | None = None
    components: tuple[FusedComponent, ...] = ()
    itemsize: int = 4

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has no elements")
        if self.itemsize not in ITEMSIZES:
            raise ValueError(f"{self.name}: itemsize {self.itemsize} is none of {ITEMSIZES}")
        if self.split_dim is None:
            if self.components:
                raise ValueError(f"{self.name}: components need a split_dim")
            return
        if not 0 <= self.split_dim < len(self.shape):
            raise ValueError(f"{self.name}: split_dim {self.split_dim} of shape {self.shape}")
        if self.components and sum(c.size for c in self.components) != self.shape[self.split_dim]:
            raise ValueError(f"{self.name}: components do not fill dimension {self.split_dim}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize

    def split_tensor(self, index: int, count: int) -> list[TensorBox]:
        """What rank `index` of `count` tensor-parallel ranks holds: a box for each component.

        Raises ValueError with the tensor's name where it does not divide.
        """
        whole = TensorBox.from_shape(self.shape)
        if self.split_dim is None or count == 1:
            return [whole]
        boxes = []
        begin = 0
        for component in self.components or (FusedComponent(self.shape[self.split_dim]),):
            try:
                start, stop = component.get_split_range(index, count)
            except ValueError as error:
                raise ValueError(f"{self.name}, dimension {self.split_dim}: {error}") from None
            boxes.append(whole.narrow(self.split_dim, begin + start, begin + stop))
            begin += component.size
        return boxes


@dataclass(frozen=True)
class ModelSpec:
    """The tensors of a model, by name in order, and the number of its places."""

    tensors: tuple[TensorSpec, ...]
    num_pipeline_positions: int

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError("two tensors of one name")
        for spec in self.tensors:
            if not spec.pipeline_positions or not all(
                0 <= at < self.num_pipeline_positions for at in spec.pipeline_positions
            ):
                raise ValueError(
                    f"{spec.name}: places {spec.pipeline_positions} of"
                    f" {self.num_pipeline_positions}"
                )

    @property
    def num_bytes(self) -> int:
        """M, the bytes of the model, each tensor once."""
        return sum(spec.num_bytes for spec in self.tensors)

    def specs_by_name(self) -> dict[str, TensorSpec]:
        """The tensors by their names."""
        return {spec.name: spec for spec in self.tensors}


def split_stages_evenly(num_places: int, stages: int) -> tuple[int, ...]:
    """How many places each stage holds: as many in each, or one more in some.

    Those spread so that fewer stages are made of whole ones wherever the numbers of stages divide:
    6 places are 2, 1, 2, 1 in four stages and 3, 3 in two.
    """
    if stages > num_places:
        raise ValueError(f"{stages} pipeline stages for {num_places} places")
    ends = [-(-index * num_places // stages) for index in range(stages + 1)]
    return tuple(stop - start for start, stop in pairwise(ends))


def merge_stages(counts: Sequence[int], stages: int) -> tuple[int, ...]:
    """The places of so many stages, each made of as many consecutive ones of these.

    For the generation stages of training stages that are listed, which zero redundancy needs whole.
    Raises ValueError where they do not divide.
    """
    if stages < 1 or len(counts) % stages:
        raise ValueError(f"{len(counts)} stages do not make up {stages}")
    ratio = len(counts) // stages
    return tuple(sum(counts[at : at + ratio]) for at in range(0, len(counts), ratio))


def list_stage_positions(counts: Sequence[int]) -> list[range]:
    """The places of every stage, for that many in each."""
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
