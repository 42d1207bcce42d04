"""Boxes: axis-aligned, half-open regions of a tensor, with their set operations."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import add


@dataclass(frozen=True, order=True)
class TensorBox:
    """Box of a tensor: the elements with start[i] <= index[i] < stop[i] in every dimension i.

    Never empty. A scalar tensor has a single box, without dimensions.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box {self.start} to {self.stop}: must have one stop for each start")
        if any(not 0 <= low < high for low, high in self.dim_ranges):
            raise ValueError(f"box {self.start} to {self.stop}: must be 0 <= start < stop")

    @classmethod
    def from_shape(cls, shape: tuple[int, ...]) -> "TensorBox":
        """Return the box of all elements of a tensor, which must have at least one."""
        return cls((0,) * len(shape), shape)

    @property
    def dim_ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every dimension."""
        return tuple(zip(self.start, self.stop, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in self.dim_ranges)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the box from the whole tensor."""
        return tuple(slice(low, high) for low, high in self.dim_ranges)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: "TensorBox") -> "TensorBox | None":
        """Return the box of all elements that are in both boxes, or None if they are disjoint."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return TensorBox(start, stop)

    def subtract_box(self, other: "TensorBox") -> list["TensorBox"]:
        """Return disjoint boxes that cover this box without `other`.

        At most two boxes per dimension: below and above the intersection in dimension 0, then
        within the intersection's range of dimension 0 below and above in dimension 1, and so on.
        """
        common = self.intersect(other)
        if common is None:
            return [self]
        remainder = []
        start, stop = list(self.start), list(self.stop)
        for i, (low, high) in enumerate(common.dim_ranges):
            if start[i] < low:
                remainder.append(TensorBox(tuple(start), (*stop[:i], low, *stop[i + 1 :])))
            if high < stop[i]:
                remainder.append(TensorBox((*start[:i], high, *start[i + 1 :]), tuple(stop)))
            start[i], stop[i] = low, high
        return remainder

    def narrow(self, dim: int, start: int, stop: int) -> "TensorBox":
        """Return a copy of the box that ranges from `start` to `stop` in dimension `dim`.

        Coordinates are those of the tensor.
        """
        return TensorBox(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def iter_flat_range(self, start: int, stop: int) -> Iterator["TensorBox"]:
        """Yield boxes that cover elements `start` to `stop` of this box, in row-major order."""
        if start == 0 and stop == self.numel:
            yield self
            return
        for box in iter_flat_boxes(self.shape, start, stop):
            yield TensorBox(
                tuple(map(add, box.start, self.start)), tuple(map(add, box.stop, self.start))
            )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in self.dim_ranges) + "]"


def subtract_boxes(boxes: Iterable[TensorBox], removed: Iterable[TensorBox]) -> list[TensorBox]:
    """Return disjoint boxes that cover the disjoint `boxes` without any of `removed`."""
    remainder = list(boxes)
    for removed_box in removed:
        remainder = [piece for box in remainder for piece in box.subtract_box(removed_box)]
    return remainder


def merge_boxes(boxes: Iterable[TensorBox]) -> list[TensorBox]:
    """Return sorted boxes of the same elements, in which adjacent ones are one where possible.

    boxes: disjoint, of one tensor.
    """
    merged = sorted(boxes)
    for dim in range(len(merged[0].start)):
        rest, merged = sorted(merged, key=lambda b: (b.narrow(dim, 0, 1), b.start[dim])), []
        for box in rest:
            last = merged[-1] if merged else box
            if last.narrow(dim, box.start[dim], box.stop[dim]) == box and (
                last.stop[dim] == box.start[dim]
            ):
                merged[-1] = last.narrow(dim, last.start[dim], box.stop[dim])
            else:
                merged.append(box)
    return sorted(merged)


def count_elements(boxes: Iterable[TensorBox]) -> int:
    """Return the number of elements in disjoint boxes."""
    return sum(box.numel for box in boxes)


def iter_flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBox]:
    """Yield boxes that cover elements `start` to `stop` of a tensor, counted in row-major order.

    A matrix needs at most three: the rest of a row, whole rows, and the beginning of a row.
    Elements 3 to 14 of a 4 x 5 matrix are [0:1, 3:5], [1:2, 0:5] and [2:3, 0:4].
    """
    if not shape:
        if start < stop:
            yield TensorBox((), ())
        return
    row_numel = math.prod(shape[1:])
    while start < stop:
        row, offset = divmod(start, row_numel)
        num_whole_rows = (stop - start) // row_numel
        if offset == 0 and num_whole_rows:
            yield TensorBox((row, *(0,) * (len(shape) - 1)), (row + num_whole_rows, *shape[1:]))
            start += num_whole_rows * row_numel
            continue
        end = min(stop, (row + 1) * row_numel)
        for box in iter_flat_boxes(shape[1:], offset, offset + end - start):
            yield TensorBox((row, *box.start), (row + 1, *box.stop))
        start = end
