"""Boxes: axis-aligned regions of a tensor, half open, and what can be asked of two of them."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import add


@dataclass(frozen=True, order=True)
class Box:
    """The elements with start[i] <= index[i] < stop[i] in every dimension i; never empty.

    A scalar tensor has one box, with no dimensions.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box {self.start} to {self.stop}: must have one stop for each start")
        if any(not 0 <= low < high for low, high in self.spans):
            raise ValueError(f"box {self.start} to {self.stop}: must be 0 <= start < stop")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """All of a tensor of that shape, which has at least one element."""
        return cls((0,) * len(shape), shape)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every dimension."""
        return tuple(zip(self.start, self.stop, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in every dimension."""
        return tuple(high - low for low, high in self.spans)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What picks the box out of the whole tensor."""
        return tuple(slice(low, high) for low, high in self.spans)

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def meet(self, other: "Box") -> "Box | None":
        """What both have, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def without(self, other: "Box") -> list["Box"]:
        """Disjoint boxes that are what this one has and the other has not."""
        common = self.meet(other)
        if common is None:
            return [self]
        left = []
        start, stop = list(self.start), list(self.stop)
        for i, (low, high) in enumerate(common.spans):
            if start[i] < low:
                left.append(Box(tuple(start), (*stop[:i], low, *stop[i + 1 :])))
            if high < stop[i]:
                left.append(Box((*start[:i], high, *start[i + 1 :]), tuple(stop)))
            start[i], stop[i] = low, high
        return left

    def narrow(self, dim: int, start: int, stop: int) -> "Box":
        """The same box with other limits, counted within the tensor, in one dimension."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def run(self, start: int, stop: int) -> Iterator["Box"]:
        """Its elements start to stop in row-major order, as boxes in that order."""
        if start == 0 and stop == self.numel:
            yield self
            return
        for part in flat_boxes(self.shape, start, stop):
            yield Box(
                tuple(map(add, part.start, self.start)), tuple(map(add, part.stop, self.start))
            )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in self.spans) + "]"


def remainder(of: Iterable[Box], taken: Iterable[Box]) -> list[Box]:
    """Disjoint boxes that are what the disjoint `of` have and none of `taken` has."""
    left = list(of)
    for other in taken:
        left = [rest for box in left for rest in box.without(other)]
    return left


def nested(inner: Iterable[Box], outer: Collection[Box]) -> bool:
    """Whether each of the inner boxes lies within one of the outer ones."""
    return all(any(box.meet(other) == box for other in outer) for box in inner)


def total(boxes: Iterable[Box]) -> int:
    """Elements in disjoint boxes."""
    return sum(box.numel for box in boxes)


def union_numel(boxes: Iterable[Box]) -> int:
    """Elements that at least one of the boxes has; they may overlap."""
    seen: list[Box] = []
    for box in boxes:
        seen.extend(remainder([box], seen))
    return total(seen)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements start to stop of a tensor in row-major order, as boxes in that order.

    A matrix needs at most three: the rest of a row, whole rows, and the beginning of one.
    """
    if not shape:
        if start < stop:
            yield Box((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        whole = (stop - start) // row
        if within == 0 and whole:
            yield Box((index, *(0,) * (len(shape) - 1)), (index + whole, *shape[1:]))
            start += whole * row
            continue
        end = min(stop, (index + 1) * row)
        for box in flat_boxes(shape[1:], within, within + end - start):
            yield Box((index, *box.start), (index + 1, *box.stop))
        start = end
