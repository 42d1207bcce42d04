"""Batches by reference: rows that lie somewhere else, cut and joined without being looked at.

A controller that moves data itself becomes the narrowest place of a cluster. It holds references
and numbers of rows; who needs rows fetches them from where they lie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: What workers take and give: columns by name, each with a row for every sample.
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class RowSlice:
    """Rows start to stop of what a reference stands for.

    is_padding: they are there once more, only to fill shares up.
    """

    reference: Any
    start: int
    stop: int
    is_padding: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"rows {self.start} to {self.stop}: must be 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ColumnBlock:
    """Parts in order; their rows one after the other are rows of the same columns."""

    slices: tuple[RowSlice, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.slices))

    def slice_rows(self, start: int, stop: int) -> "ColumnBlock":
        """Some of the rows."""
        found = []
        begin = 0
        for part in self.slices:
            low, high = max(start - begin, 0), min(stop - begin, len(part))
            if low < high:
                found.append(replace(part, start=part.start + low, stop=part.start + high))
            begin += len(part)
        # No rows still have columns.
        first = tuple(replace(part, stop=part.start) for part in self.slices[:1])
        return ColumnBlock(tuple(found) or first)

    def to_padding(self) -> "ColumnBlock":
        """The same rows, marked as padding."""
        return ColumnBlock(tuple(replace(part, is_padding=True) for part in self.slices))

    @property
    def num_padding(self) -> int:
        """Rows at its end that are padding. Raises ValueError if there are some elsewhere."""
        marks = [part.is_padding for part in self.slices]
        if marks != sorted(marks):
            raise ValueError("rows behind padding: padding has to be the end of what a rank gets")
        return sum(len(part) for part in self.slices if part.is_padding)


@dataclass(frozen=True)
class BatchRef:
    """Strips side by side, all as long: the columns of each, row for row."""

    blocks: tuple[ColumnBlock, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(strip) for strip in self.blocks}
        if len(lengths) > 1:
            raise ValueError(f"columns of {sorted(lengths)} rows side by side")

    @classmethod
    def from_slices(cls, *parts: RowSlice) -> "BatchRef":
        """The rows of some parts, one after the other."""
        return cls((ColumnBlock(parts),))

    def __len__(self) -> int:
        return len(self.blocks[0]) if self.blocks else 0

    def __or__(self, other: "BatchRef") -> "BatchRef":
        """With the other's columns beside its own."""
        if not isinstance(other, BatchRef):
            return NotImplemented
        return BatchRef(self.blocks + other.blocks)

    def slice_rows(self, start: int, stop: int) -> "BatchRef":
        """Some of the rows."""
        return BatchRef(tuple(strip.slice_rows(start, stop) for strip in self.blocks))

    def split(self, count: int) -> list["BatchRef"]:
        """As many pieces of the same length, in order; raises ValueError if that cannot be."""
        share, rest = divmod(len(self), count)
        if rest:
            raise ValueError(f"{len(self)} rows do not split into {count}")
        return [self.slice_rows(index * share, (index + 1) * share) for index in range(count)]

    def pad_to_multiple(self, multiple: int) -> "BatchRef":
        """With rows from its beginning behind it, until it divides; empty stays empty."""
        found = self
        lacking = -len(self) % multiple if len(self) else 0
        while lacking:
            more = BatchRef(
                tuple(strip.to_padding() for strip in self.slice_rows(0, lacking).blocks)
            )
            found, lacking = join_batches([found, more]), lacking - len(more)
        return found

    @property
    def num_padding(self) -> int:
        """Rows at its end that are padding. Raises ValueError if there are some elsewhere."""
        return max((strip.num_padding for strip in self.blocks), default=0)


def join_batches(batches: Sequence[BatchRef]) -> BatchRef:
    """The rows of several, one batch after the other; all have as many strips."""
    each = zip(*(batch.blocks for batch in batches), strict=True)
    return BatchRef(tuple(_concat_blocks(strips) for strips in each))


def _concat_blocks(strips: Sequence[ColumnBlock]) -> ColumnBlock:
    parts = tuple(part for strip in strips for part in strip.slices)
    return ColumnBlock(tuple(part for part in parts if len(part)) or parts[:1])


def is_batch(value: Any) -> bool:
    """Whether it has columns by name, each with rows: lists, or arrays or tensors."""
    return isinstance(value, Mapping) and bool(value) and all(map(_is_column, value.values()))


def _is_column(value: Any) -> bool:
    return isinstance(value, list | tuple) or (hasattr(value, "shape") and len(value.shape) > 0)


def count_rows(batch: Batch) -> int:
    """Rows of a batch. Raises ValueError where its columns do not agree."""
    lengths = {name: len(column) for name, column in batch.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(f"columns of different lengths ({told})")
    return next(iter(lengths.values()), 0)


def slice_columns(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    """Some rows of every column."""
    return {name: column[start:stop] for name, column in batch.items()}


def concat_columns(batches: Sequence[Batch]) -> dict[str, Any]:
    """One batch of several with the same columns: arrays and tensors along rows, lists as lists."""
    if not batches:
        return {}
    names = batches[0].keys()
    if any(batch.keys() != names for batch in batches):
        told = " and ".join(sorted({str(sorted(batch)) for batch in batches}))
        raise ValueError(f"batches of different columns: {told}")
    return {name: _concat_column([batch[name] for batch in batches]) for name in names}


def _concat_column(columns: Sequence[Any]) -> Any:
    first = columns[0]
    if len(columns) == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate(columns)
    if isinstance(first, list | tuple):
        return [row for column in columns for row in column]
    import torch

    return torch.cat(list(columns))
