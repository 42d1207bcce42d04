"""Boxes: axis-aligned regions of a tensor, half open, and what can be asked of two of them."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import add


@dataclass(frozen=True, order=True)
class TensorBox:
    """The elements with start[i] <= index[i] < stop[i] in every dimension i; never empty.

    A scalar tensor has one box, with no dimensions.
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
        """All of a tensor of that shape, which has at least one element."""
        return cls((0,) * len(shape), shape)

    @property
    def dim_ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every dimension."""
        return tuple(zip(self.start, self.stop, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in every dimension."""
        return tuple(high - low for low, high in self.dim_ranges)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What picks the box out of the whole tensor."""
        return tuple(slice(low, high) for low, high in self.dim_ranges)

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: "TensorBox") -> "TensorBox | None":
        """What both have, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return TensorBox(start, stop)

    def subtract_box(self, other: "TensorBox") -> list["TensorBox"]:
        """Disjoint boxes that are what this one has and the other has not."""
        common = self.intersect(other)
        if common is None:
            return [self]
        left = []
        start, stop = list(self.start), list(self.stop)
        for i, (low, high) in enumerate(common.dim_ranges):
            if start[i] < low:
                left.append(TensorBox(tuple(start), (*stop[:i], low, *stop[i + 1 :])))
            if high < stop[i]:
                left.append(TensorBox((*start[:i], high, *start[i + 1 :]), tuple(stop)))
            start[i], stop[i] = low, high
        return left

    def narrow(self, dim: int, start: int, stop: int) -> "TensorBox":
        """The same box with other limits, counted within the tensor, in one dimension."""
        return TensorBox(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def iter_flat_range(self, start: int, stop: int) -> Iterator["TensorBox"]:
        """Its elements start to stop in row-major order, as boxes in that order."""
        if start == 0 and stop == self.numel:
            yield self
            return
        for part in iter_flat_boxes(self.shape, start, stop):
            yield TensorBox(
                tuple(map(add, part.start, self.start)), tuple(map(add, part.stop, self.start))
            )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in self.dim_ranges) + "]"


def subtract_boxes(of: Iterable[TensorBox], taken: Iterable[TensorBox]) -> list[TensorBox]:
    """Disjoint boxes that are what the disjoint `of` have and none of `taken` has."""
    left = list(of)
    for other in taken:
        left = [rest for box in left for rest in box.subtract_box(other)]
    return left


def is_nested(inner: Iterable[TensorBox], outer: Collection[TensorBox]) -> bool:
    """Whether each of the inner boxes lies within one of the outer ones."""
    return all(any(box.intersect(other) == box for other in outer) for box in inner)


def count_elements(boxes: Iterable[TensorBox]) -> int:
    """Elements in disjoint boxes."""
    return sum(box.numel for box in boxes)


def count_union_elements(boxes: Iterable[TensorBox]) -> int:
    """Elements that at least one of the boxes has; they may overlap."""
    seen: list[TensorBox] = []
    for box in boxes:
        seen.extend(subtract_boxes([box], seen))
    return count_elements(seen)


def iter_flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBox]:
    """Elements start to stop of a tensor in row-major order, as boxes in that order.

    A matrix needs at most three: the rest of a row, whole rows, and the beginning of one.
    """
    if not shape:
        if start < stop:
            yield TensorBox((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        whole = (stop - start) // row
        if within == 0 and whole:
            yield TensorBox((index, *(0,) * (len(shape) - 1)), (index + whole, *shape[1:]))
            start += whole * row
            continue
        end = min(stop, (index + 1) * row)
        for box in iter_flat_boxes(shape[1:], within, within + end - start):
            yield TensorBox((index, *box.start), (index + 1, *box.stop))
        start = end
