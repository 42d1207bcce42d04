"""Patterns: tensors that all ranks hold and want in the same boxes, which are planned once.

The layers of a model are alike, so a model of hundreds of tensors has a few patterns. Within one,
what is held is cut into fragments that no two ranks hold different parts of.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from streamrl.resharding.boxes import TensorBox, count_elements, subtract_boxes
from streamrl.resharding.layouts import ModelLayout, TensorShard

Key = TypeVar("Key", bound=Hashable)

#: A box, and the ranks that hold all of it.
BoxFragment = tuple[TensorBox, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class ShardPattern:
    """Tensors of one shape and element size, cut alike on every rank.

    held, wanted: the boxes of each rank that has any, in the source and in the target.
    """

    tensors: tuple[str, ...]
    itemsize: int
    source_boxes: Mapping[int, tuple[TensorBox, ...]]
    target_boxes: Mapping[int, tuple[TensorBox, ...]]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of all of the tensors."""
        return self.itemsize * len(self.tensors)

    def group_receivers(self, ranks: Iterable[int]) -> dict[tuple[TensorBox, ...], list[int]]:
        """Of these ranks those that want any, by the boxes that they want."""
        return _group_by_value(
            {rank: self.target_boxes[rank] for rank in ranks if rank in self.target_boxes}
        )

    @property
    def ranks_by_boxes(
        self,
    ) -> Mapping[tuple[tuple[TensorBox, ...], tuple[TensorBox, ...]], list[int]]:
        """The ranks by what they hold and what they want."""
        ranks = sorted({*self.source_boxes, *self.target_boxes})
        return _group_by_value(
            {
                rank: (self.source_boxes.get(rank, ()), self.target_boxes.get(rank, ()))
                for rank in ranks
            }
        )

    def find_fragments(self, ranks: Iterable[int] | None = None) -> "FragmentSet":
        """What these ranks hold, or all."""
        holders: dict[TensorBox, tuple[int, ...]] = {}
        for rank in self.source_boxes if ranks is None else ranks:
            for box in self.source_boxes.get(rank, ()):
                holders[box] = (*holders.get(box, ()), rank)
        if _has_overlap(list(holders)):
            holders = _split_overlaps(holders)
        return FragmentSet(tuple(holders.items()))


@dataclass(frozen=True, eq=False)
class FragmentSet:
    """Disjoint boxes of a tensor, each with all the ranks that hold it."""

    fragments: tuple[BoxFragment, ...]

    def find_within(self, wanted: Sequence[TensorBox]) -> list[BoxFragment]:
        """The parts of them that lie in the wanted boxes, which are disjoint."""
        if not self.fragments:
            return []
        start, stop = self._corners
        meets = np.zeros((len(self.fragments), len(wanted)), dtype=bool)
        for column, box in enumerate(wanted):
            meets[:, column] = ((start < box.stop) & (stop > box.start)).all(axis=1)
        return [
            (common, self.fragments[row][1])
            for row, column in np.argwhere(meets).tolist()
            if (common := self.fragments[row][0].intersect(wanted[column]))
        ]

    def find_missing(
        self, wanted: Sequence[TensorBox], found: Sequence[BoxFragment]
    ) -> list[TensorBox]:
        """What of the wanted boxes nobody holds, where `found` is what lies within them."""
        if count_elements(box for box, _ in found) == count_elements(wanted):
            return []
        return subtract_boxes(wanted, [box for box, _ in found])

    @cached_property
    def _corners(self) -> tuple[np.ndarray, np.ndarray]:
        return _stack_corners([box for box, _ in self.fragments])


def find_patterns(source: ModelLayout, target: ModelLayout) -> list[ShardPattern]:
    """The patterns of the target's model, in the order of their first tensors."""
    forms = _ShardForms()
    found: dict[Hashable, list[str]] = {}
    sizes = {}
    for spec in target.model.tensors:
        sizes[spec.name] = spec.itemsize
        key = (
            spec.shape,
            spec.itemsize,
            forms.list_forms(source, spec.name),
            forms.list_forms(target, spec.name),
        )
        found.setdefault(key, []).append(spec.name)
    return [
        ShardPattern(
            tuple(tensors),
            sizes[first],
            _boxes_by_rank(source, first),
            _boxes_by_rank(target, first),
        )
        for tensors in found.values()
        for first in tensors[:1]
    ]


class _ShardForms:
    """Numbers for how shards are cut, whatever their tensors are called."""

    def __init__(self) -> None:
        self._form_ids: dict[Hashable, int] = {}
        # By identity, as the replicas of a layout share their shards.
        self._ids_by_shard: dict[int, int] = {}

    def list_forms(self, layout: ModelLayout, tensor: str) -> tuple[tuple[int, int], ...]:
        """Of each rank that holds some of a tensor, the form of its shard."""
        return tuple(
            (rank, self._get_form_id(shard))
            for rank, shards in layout.shards.items()
            if (shard := shards.get(tensor))
        )

    def _get_form_id(self, shard: TensorShard) -> int:
        if id(shard) not in self._ids_by_shard:
            form = (shard.shape, shard.box_origins, shard.flat_range)
            self._ids_by_shard[id(shard)] = self._form_ids.setdefault(form, len(self._form_ids))
        return self._ids_by_shard[id(shard)]


def _boxes_by_rank(layout: ModelLayout, tensor: str) -> dict[int, tuple[TensorBox, ...]]:
    return {
        rank: tuple(boxes) for rank in layout.ranks if (boxes := layout.get_boxes(rank, tensor))
    }


def _group_by_value(kinds: Mapping[int, Key]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = {}
    for rank, kind in kinds.items():
        found.setdefault(kind, []).append(rank)
    return found


def _stack_corners(boxes: Sequence[TensorBox]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([box.start for box in boxes], dtype=np.int64)
    stop = np.array([box.stop for box in boxes], dtype=np.int64)
    return start, stop


def _has_overlap(boxes: Sequence[TensorBox]) -> bool:
    """Whether any two of them do."""
    if not boxes:
        return False
    start, stop = _stack_corners(boxes)
    return any(
        bool(((start[index + 1 :] < high) & (stop[index + 1 :] > low)).all(axis=1).any())
        for index, (low, high) in enumerate(zip(start, stop, strict=True))
    )


def _split_overlaps(
    holders: Mapping[TensorBox, tuple[int, ...]],
) -> dict[TensorBox, tuple[int, ...]]:
    """The same, cut where boxes overlap."""
    apart: dict[TensorBox, tuple[int, ...]] = {}
    for box, ranks in holders.items():
        cut: dict[TensorBox, tuple[int, ...]] = {}
        for other, others in apart.items():
            if common := other.intersect(box):
                cut[common] = (*others, *ranks)
            cut.update(dict.fromkeys(other.subtract_box(box), others))
        cut.update(dict.fromkeys(subtract_boxes([box], apart), ranks))
        apart = cut
    return apart
