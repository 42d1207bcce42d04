"""Tensors of a model as resharding sees them: shapes, allowed splits, and pipeline positions.

A transformer is a row of pipeline positions: 0 for the embedding, 1 to L for its L layers, and L +
1 for the head. A pipeline stage holds a range of positions. A tensor lies in every stage that holds
one of its positions; a tied embedding has two, the first and the last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamrl.resharding.boxes import TensorBox


@dataclass(frozen=True)
class FusedComponent:
    """A matrix that is fused with others into a tensor, along the tensor's `split_dim`.

    size: elements in that dimension. num_units: indivisible units, such as attention heads; with
    more ranks than units, several ranks hold the same unit. None allows a split anywhere.
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
        """Return start and stop, within this component, of the elements of rank `index` of `count`.

        With 8 units of 16 elements and 4 ranks, rank 1 gets (32, 64); with 2 units and 4 ranks,
        ranks 0 and 1 both get unit 0. Raises ValueError if neither number divides the other.
        """
        num_units = self.size if self.num_units is None else self.num_units
        unit_size = self.size // num_units
        if num_units % count == 0:
            rank_size = num_units // count * unit_size
            return index * rank_size, (index + 1) * rank_size
        if self.num_units is not None and count % num_units == 0:
            start = index * num_units // count * unit_size
            return start, start + unit_size
        raise ValueError(f"{num_units} units do not divide among {count} ranks")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model before it is split among ranks.

    pipeline_positions: positions that need the tensor. split_dim: dimension that tensor parallelism
    splits; None if every rank holds the whole tensor. components: matrices fused along that
    dimension, in order; empty for a single component.
    """

    name: str
    shape: tuple[int, ...]
    pipeline_positions: tuple[int, ...]
    split_dim: int | None = None
    components: tuple[FusedComponent, ...] = ()
    itemsize: int = 4

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize

    def split_tensor(self, index: int, count: int) -> list[TensorBox]:
        """Return the boxes of tensor-parallel rank `index` of `count`: a box for each component.

        Raises ValueError with the tensor's name if the tensor does not divide.
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
    """Tensors of a model in order, of different names, and the number of pipeline positions."""

    tensors: tuple[TensorSpec, ...]
    num_pipeline_positions: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole model, each tensor once."""
        return sum(spec.num_bytes for spec in self.tensors)

    @property
    def itemsizes(self) -> dict[str, int]:
        """Bytes per element of each tensor, by name."""
        return {spec.name: spec.itemsize for spec in self.tensors}


def split_stages_evenly(num_positions: int, stages: int) -> tuple[int, ...]:
    """Return the number of pipeline positions (layers) of each of `stages` pipeline stages.

    Stages differ by at most one position. Larger stages are spread so that merging stages stays
    exact if the numbers of stages divide: 6 positions are 2, 1, 2, 1 in four stages and 3, 3 in
    two.
    """
    if stages > num_positions:
        raise ValueError(f"{stages} pipeline stages for {num_positions} positions")
    ends = [-(-index * num_positions // stages) for index in range(stages + 1)]
    return tuple(stop - start for start, stop in pairwise(ends))


def list_stage_positions(counts: Sequence[int]) -> list[range]:
    """Return the pipeline positions of every stage, given the number of positions in each."""
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
