"""Batches by reference: slice and join rows without loading them.

Data through the controller would make it the bottleneck of a cluster. The controller handles object
references and row numbers; a worker fetches the rows it needs.

    BatchRef   = ColumnBlock | ColumnBlock ...     side by side: more columns, equal rows
    ColumnBlock = RowSlice, RowSlice, ...          below each other: more rows, equal columns
    RowSlice   = rows start:stop of one stored batch
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: Input and output of a worker method: columns by name, with a row per sample.
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class RowSlice:
    """Rows start:stop of a stored batch.

    is_padding: the rows are repeated ones, which only make the ranks' batches equally long.
    """

    reference: Any
    start: int
    stop: int
    is_padding: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"rows {self.start}:{self.stop}: must be 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ColumnBlock:
    """Some columns of a batch: slices of stored batches with these columns, in row order."""

    slices: tuple[RowSlice, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.slices))

    def slice_rows(self, start: int, stop: int) -> "ColumnBlock":
        slices = []
        offset = 0
        for row_slice in self.slices:
            low, high = max(start - offset, 0), min(stop - offset, len(row_slice))
            if low < high:
                slices.append(
                    replace(row_slice, start=row_slice.start + low, stop=row_slice.start + high)
                )
            offset += len(row_slice)
        # An empty slice keeps the reference, and so the columns.
        empty = tuple(replace(row_slice, stop=row_slice.start) for row_slice in self.slices[:1])
        return ColumnBlock(tuple(slices) or empty)

    def to_padding(self) -> "ColumnBlock":
        """Return the same rows, marked as padding."""
        return ColumnBlock(tuple(replace(row_slice, is_padding=True) for row_slice in self.slices))

    @property
    def num_padding(self) -> int:
        """Number of padding rows, which must be the last rows; otherwise raises ValueError."""
        marks = [row_slice.is_padding for row_slice in self.slices]
        if marks != sorted(marks):
            raise ValueError(
                "real rows after padding: a rank's padding must be at the end of its rows"
            )
        return sum(len(row_slice) for row_slice in self.slices if row_slice.is_padding)


@dataclass(frozen=True)
class BatchRef:
    """Reference to a batch: blocks of columns side by side, with equal numbers of rows."""

    blocks: tuple[ColumnBlock, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(block) for block in self.blocks}
        if len(lengths) > 1:
            raise ValueError(
                f"cannot put columns of {sorted(lengths)} rows side by side: lengths must be equal"
            )

    @classmethod
    def from_slices(cls, *slices: RowSlice) -> "BatchRef":
        return cls((ColumnBlock(slices),))

    def __len__(self) -> int:
        return len(self.blocks[0]) if self.blocks else 0

    def __or__(self, other: "BatchRef") -> "BatchRef":
        """Return the batch with the columns of both batches, which have the same rows."""
        if not isinstance(other, BatchRef):
            return NotImplemented
        return BatchRef(self.blocks + other.blocks)

    def slice_rows(self, start: int, stop: int) -> "BatchRef":
        return BatchRef(tuple(block.slice_rows(start, stop) for block in self.blocks))

    def split(self, count: int) -> list["BatchRef"]:
        """Split the rows into `count` batches of equal length, in order.

        Raises ValueError if the number of rows is not divisible.
        """
        length, remainder = divmod(len(self), count)
        if remainder:
            raise ValueError(f"{len(self)} rows do not split into {count} equal parts")
        return [self.slice_rows(index * length, (index + 1) * length) for index in range(count)]

    def pad_to_multiple(self, multiple: int) -> "BatchRef":
        """Return the batch with its first rows repeated as padding, up to a multiple of `multiple`.

        3 rows padded to a multiple of 8: rows 0 1 2, then 0 1 2 0 1 as padding. An empty batch
        stays empty.
        """
        padded = self
        num_missing = -len(self) % multiple if len(self) else 0
        while num_missing:
            padding = BatchRef(
                tuple(block.to_padding() for block in self.slice_rows(0, num_missing).blocks)
            )
            padded, num_missing = join_batches([padded, padding]), num_missing - len(padding)
        return padded

    @property
    def num_padding(self) -> int:
        return max((block.num_padding for block in self.blocks), default=0)


def join_batches(batches: Sequence[BatchRef]) -> BatchRef:
    """Return a batch with the rows of all batches, which must have equally many column blocks."""
    blocks_by_position = zip(*(batch.blocks for batch in batches), strict=True)
    return BatchRef(tuple(_concat_blocks(blocks) for blocks in blocks_by_position))


def _concat_blocks(blocks: Sequence[ColumnBlock]) -> ColumnBlock:
    slices = tuple(row_slice for block in blocks for row_slice in block.slices)
    return ColumnBlock(tuple(row_slice for row_slice in slices if len(row_slice)) or slices[:1])


def is_batch(value: Any) -> bool:
    """Return whether a value is a batch by value: a dict of lists, arrays or tensors with rows."""
    return isinstance(value, Mapping) and bool(value) and all(map(_is_column, value.values()))


def _is_column(value: Any) -> bool:
    return isinstance(value, list | tuple) or (hasattr(value, "shape") and len(value.shape) > 0)


def count_rows(batch: Batch) -> int:
    """Return the number of rows of a batch. Raises ValueError if its columns differ in length."""
    lengths = {name: len(column) for name, column in batch.items()}
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ValueError(f"columns of different lengths ({described})")
    return next(iter(lengths.values()), 0)


def slice_columns(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    """Return rows start:stop of every column of a batch."""
    return {name: column[start:stop] for name, column in batch.items()}


def concat_columns(batches: Sequence[Batch]) -> dict[str, Any]:
    """Return a batch with the rows of all batches, which have the same columns.

    Arrays and tensors are joined along the first dimension, lists as lists.
    """
    if not batches:
        return {}
    names = batches[0].keys()
    if any(batch.keys() != names for batch in batches):
        described = " and ".join(sorted({str(sorted(batch)) for batch in batches}))
        raise ValueError(f"cannot concatenate batches with different columns: {described}")
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
