"""Batches by reference: join, split and rename columns and rows without loading them.

Data through the controller would make it the bottleneck of a cluster. The controller handles object
references, column names and row numbers; a worker fetches the rows it needs.

    BatchRef  = columns by name, with equal numbers of rows
    ColumnRef = RowSlice, RowSlice, ...          below each other: more rows
    RowSlice  = rows start:stop of a column of one stored batch
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

#: Input and output of a worker method: columns by name, with a row per sample.
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class RowSlice:
    """Rows start:stop of a column of a stored batch."""

    reference: Any
    column: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


ColumnRef = tuple[RowSlice, ...]


@dataclass(frozen=True)
class BatchRef:
    """Reference to a batch: columns by name, with equal numbers of rows."""

    columns: Mapping[str, ColumnRef]

    def __post_init__(self) -> None:
        lengths = {sum(map(len, column)) for column in self.columns.values()}
        if not lengths:
            raise ValueError("a batch must have at least one column")
        if len(lengths) > 1:
            raise ValueError(
                f"cannot put columns of {sorted(lengths)} rows side by side: lengths must be equal"
            )

    @classmethod
    def from_stored(cls, reference: Any, names: Iterable[str], num_rows: int) -> "BatchRef":
        """Return the reference to all rows of a stored batch with columns `names`."""
        return cls({name: (RowSlice(reference, name, 0, num_rows),) for name in names})

    def __len__(self) -> int:
        return sum(map(len, next(iter(self.columns.values()))))

    def __or__(self, other: "BatchRef") -> "BatchRef":
        """Return the batch with the columns of both batches, which have the same rows.

        Raises ValueError if both have a column; `drop` takes it out of one.
        """
        if not isinstance(other, BatchRef):
            return NotImplemented
        if duplicates := sorted(self.columns.keys() & other.columns.keys()):
            raise ValueError(f"columns {', '.join(duplicates)} are in both of the joined batches")
        return BatchRef({**self.columns, **other.columns})

    def drop(self, *names: str) -> "BatchRef":
        self._check_names("drop", names)
        return BatchRef({name: self.columns[name] for name in self.columns if name not in names})

    def rename(self, new_names: Mapping[str, str]) -> "BatchRef":
        """Return the batch with columns renamed from the keys of `new_names` to its values."""
        self._check_names("rename", new_names)
        renamed = [new_names.get(name, name) for name in self.columns]
        if duplicates := sorted({name for name in renamed if renamed.count(name) > 1}):
            raise ValueError(f"rename: two columns would be named {', '.join(duplicates)}")
        return BatchRef(dict(zip(renamed, self.columns.values(), strict=True)))

    def _check_names(self, verb: str, names: Iterable[str]) -> None:
        if missing := sorted(set(names) - self.columns.keys()):
            raise ValueError(
                f"{verb}: the batch has no column {', '.join(missing)}; its columns:"
                f" {', '.join(self.columns)}"
            )

    def slice_rows(self, start: int, stop: int) -> "BatchRef":
        columns = self.columns.items()
        return BatchRef({name: _slice_column(column, start, stop) for name, column in columns})

    def split(self, count: int) -> list["BatchRef"]:
        """Split the rows into `count` batches in order; the first may have one row more."""
        length, remainder = divmod(len(self), count)
        stops = [(i + 1) * length + min(i + 1, remainder) for i in range(count)]
        return [self.slice_rows(*rows) for rows in pairwise([0, *stops])]

    @property
    def references(self) -> list[Any]:
        """References of the stored batches that have the rows, without repetition."""
        columns = self.columns.values()
        return list(dict.fromkeys(rows.reference for column in columns for rows in column))

    def resolve_columns(self, stored: Mapping[Any, Batch]) -> dict[str, Any]:
        """Return the columns of the batch by value; `stored` maps references to stored batches."""
        return {
            name: _concat_rows(
                [stored[rows.reference][rows.column][rows.start : rows.stop] for rows in column]
            )
            for name, column in self.columns.items()
        }


def join_batches(batches: Sequence[BatchRef]) -> BatchRef:
    """Return a batch with the rows of all batches, which must have the same columns."""
    names = batches[0].columns.keys()
    if any(batch.columns.keys() != names for batch in batches):
        described = " and ".join(sorted({str(sorted(batch.columns)) for batch in batches}))
        raise ValueError(f"cannot join batches with different columns: {described}")
    return BatchRef(
        {
            name: _omit_empty([rows for batch in batches for rows in batch.columns[name]])
            for name in names
        }
    )


def _slice_column(column: ColumnRef, start: int, stop: int) -> ColumnRef:
    slices, offset = [], 0
    for rows in column:
        low = min(max(start - offset, 0), len(rows))
        high = max(min(stop - offset, len(rows)), low)
        slices.append(replace(rows, start=rows.start + low, stop=rows.start + high))
        offset += len(rows)
    return _omit_empty(slices)


def _omit_empty(slices: Sequence[RowSlice]) -> ColumnRef:
    """Return the slices with rows; one without if there are no others, to keep the column."""
    return tuple(rows for rows in slices if len(rows)) or tuple(slices[:1])


def _concat_rows(pieces: Sequence[Any]) -> Any:
    """Concatenate pieces of a column: arrays and tensors along the first dimension, or lists."""
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    if isinstance(pieces[0], list | tuple):
        return [row for piece in pieces for row in piece]
    import torch

    return torch.cat(list(pieces))


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
