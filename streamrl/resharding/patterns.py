"""Patterns: tensors that all ranks hold and want in the same boxes, which are planned once.

The layers of a model are alike, so a model of hundreds of tensors has a few patterns. Within one,
what is held is cut into fragments that no two ranks hold different parts of.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from streamrl.resharding.boxes import Box, remainder, total
from streamrl.resharding.layouts import Layout, Shard

Key = TypeVar("Key", bound=Hashable)

#: A box, and the ranks that hold all of it.
Fragment = tuple[Box, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Pattern:
    """Tensors of one shape and element size, cut alike on every rank.

    held, wanted: the boxes of each rank that has any, in the source and in the target.
    """

    tensors: tuple[str, ...]
    itemsize: int
    held: Mapping[int, tuple[Box, ...]]
    wanted: Mapping[int, tuple[Box, ...]]

    @property
    def bytes_each(self) -> int:
        """Bytes of one element of all of the tensors."""
        return self.itemsize * len(self.tensors)

    def takers(self, ranks: Iterable[int]) -> dict[tuple[Box, ...], list[int]]:
        """Of these ranks those that want any, by the boxes that they want."""
        return _same({rank: self.wanted[rank] for rank in ranks if rank in self.wanted})

    @property
    def pairs(self) -> Mapping[tuple[tuple[Box, ...], tuple[Box, ...]], list[int]]:
        """The ranks by what they hold and what they want."""
        ranks = sorted({*self.held, *self.wanted})
        return _same({rank: (self.held.get(rank, ()), self.wanted.get(rank, ())) for rank in ranks})

    def fragments(self, ranks: Iterable[int] | None = None) -> "Fragments":
        """What these ranks hold, or all."""
        holders: dict[Box, tuple[int, ...]] = {}
        for rank in self.held if ranks is None else ranks:
            for box in self.held.get(rank, ()):
                holders[box] = (*holders.get(box, ()), rank)
        if _overlap(list(holders)):
            holders = _apart(holders)
        return Fragments(tuple(holders.items()))


@dataclass(frozen=True, eq=False)
class Fragments:
    """Disjoint boxes of a tensor, each with all the ranks that hold it."""

    held: tuple[Fragment, ...]

    def within(self, wanted: Sequence[Box]) -> list[Fragment]:
        """The parts of them that lie in the wanted boxes, which are disjoint."""
        if not self.held:
            return []
        start, stop = self._limits
        meets = np.zeros((len(self.held), len(wanted)), dtype=bool)
        for column, box in enumerate(wanted):
            meets[:, column] = ((start < box.stop) & (stop > box.start)).all(axis=1)
        return [
            (common, self.held[row][1])
            for row, column in np.argwhere(meets).tolist()
            if (common := self.held[row][0].meet(wanted[column]))
        ]

    def lacking(self, wanted: Sequence[Box], found: Sequence[Fragment]) -> list[Box]:
        """What of the wanted boxes nobody holds, where `found` is what lies within them."""
        if total(box for box, _ in found) == total(wanted):
            return []
        return remainder(wanted, [box for box, _ in found])

    @cached_property
    def _limits(self) -> tuple[np.ndarray, np.ndarray]:
        return _limits([box for box, _ in self.held])


def patterns(source: Layout, target: Layout) -> list[Pattern]:
    """The patterns of the target's model, in the order of their first tensors."""
    forms = _Forms()
    found: dict[Hashable, list[str]] = {}
    sizes = {}
    for spec in target.model.tensors:
        sizes[spec.name] = spec.itemsize
        key = (spec.shape, spec.itemsize, forms.of(source, spec.name), forms.of(target, spec.name))
        found.setdefault(key, []).append(spec.name)
    return [
        Pattern(tuple(tensors), sizes[first], _boxes(source, first), _boxes(target, first))
        for tensors in found.values()
        for first in tensors[:1]
    ]


class _Forms:
    """Numbers for how shards are cut, whatever their tensors are called."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        # By identity, as the replicas of a layout share their shards.
        self._seen: dict[int, int] = {}

    def of(self, layout: Layout, tensor: str) -> tuple[tuple[int, int], ...]:
        """Of each rank that holds some of a tensor, the form of its shard."""
        return tuple(
            (rank, self._form(shard))
            for rank, shards in layout.shards.items()
            if (shard := shards.get(tensor))
        )

    def _form(self, shard: Shard) -> int:
        if id(shard) not in self._seen:
            form = (shard.shape, shard.parts, shard.run)
            self._seen[id(shard)] = self._numbers.setdefault(form, len(self._numbers))
        return self._seen[id(shard)]


def _boxes(layout: Layout, tensor: str) -> dict[int, tuple[Box, ...]]:
    return {rank: tuple(boxes) for rank in layout.ranks if (boxes := layout.boxes(rank, tensor))}


def _same(kinds: Mapping[int, Key]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = {}
    for rank, kind in kinds.items():
        found.setdefault(kind, []).append(rank)
    return found


def _limits(boxes: Sequence[Box]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([box.start for box in boxes], dtype=np.int64)
    stop = np.array([box.stop for box in boxes], dtype=np.int64)
    return start, stop


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two of them do."""
    if not boxes:
        return False
    start, stop = _limits(boxes)
    return any(
        bool(((start[index + 1 :] < high) & (stop[index + 1 :] > low)).all(axis=1).any())
        for index, (low, high) in enumerate(zip(start, stop, strict=True))
    )


def _apart(holders: Mapping[Box, tuple[int, ...]]) -> dict[Box, tuple[int, ...]]:
    """The same, cut where boxes overlap."""
    apart: dict[Box, tuple[int, ...]] = {}
    for box, ranks in holders.items():
        cut: dict[Box, tuple[int, ...]] = {}
        for other, others in apart.items():
            if common := other.meet(box):
                cut[common] = (*others, *ranks)
            cut.update(dict.fromkeys(other.without(box), others))
        cut.update(dict.fromkeys(remainder([box], apart), ranks))
        apart = cut
    return apart
