"""Shard patterns: tensors with the same boxes on all ranks in source and target, planned once.

The layers of a model are alike, so hundreds of tensors form a few patterns. Within a pattern the
source boxes are divided into fragments, such that every rank holds all or nothing of a fragment.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from streamrl.resharding.boxes import TensorBox, count_elements, subtract_boxes
from streamrl.resharding.layouts import ModelLayout, TensorShard

Key = TypeVar("Key", bound=Hashable)

#: A box and the ranks that hold it.
BoxFragment = tuple[TensorBox, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class ShardPattern:
    """Tensors of the same shape and itemsize, sharded alike on every rank in both layouts.

    source_boxes, target_boxes: boxes by rank, without ranks that have none.
    """

    tensors: tuple[str, ...]
    itemsize: int
    source_boxes: Mapping[int, tuple[TensorBox, ...]]
    target_boxes: Mapping[int, tuple[TensorBox, ...]]

    @property
    def element_bytes(self) -> int:
        """Bytes of an element, summed over all tensors of the pattern."""
        return self.itemsize * len(self.tensors)

    def group_receivers(self, ranks: Iterable[int]) -> dict[tuple[TensorBox, ...], list[int]]:
        """Group ranks by the target boxes that they need, leaving out ranks that need none."""
        return _group_by_value(
            {rank: self.target_boxes[rank] for rank in ranks if rank in self.target_boxes}
        )

    @property
    def ranks_by_boxes(
        self,
    ) -> Mapping[tuple[tuple[TensorBox, ...], tuple[TensorBox, ...]], list[int]]:
        """Ranks grouped by the boxes they have: (source boxes, target boxes)."""
        ranks = sorted({*self.source_boxes, *self.target_boxes})
        return _group_by_value(
            {
                rank: (self.source_boxes.get(rank, ()), self.target_boxes.get(rank, ()))
                for rank in ranks
            }
        )

    def find_fragments(self, ranks: Iterable[int] | None = None) -> "FragmentSet":
        """Divide the source boxes of `ranks` (None: all) into disjoint fragments and find holders.

        All ranks that hold one element of a fragment hold the whole fragment.
        """
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

    def find_within(self, boxes: Sequence[TensorBox]) -> list[BoxFragment]:
        """Return the intersections of the fragments with disjoint `boxes`, each with its holders.

        Vectorized over fragments, because layouts of thousands of ranks have thousands of them.
        """
        if not self.fragments:
            return []
        start, stop = self._corners
        overlaps = np.zeros((len(self.fragments), len(boxes)), dtype=bool)
        for column, box in enumerate(boxes):
            overlaps[:, column] = ((start < box.stop) & (stop > box.start)).all(axis=1)
        return [
            (common, self.fragments[row][1])
            for row, column in np.argwhere(overlaps).tolist()
            if (common := self.fragments[row][0].intersect(boxes[column]))
        ]

    def find_missing(
        self, boxes: Sequence[TensorBox], fragments: Sequence[BoxFragment]
    ) -> list[TensorBox]:
        """Return the parts of `boxes` that no rank holds.

        fragments: result of `find_within` for these boxes.
        """
        if count_elements(fragment for fragment, _ in fragments) == count_elements(boxes):
            return []
        return subtract_boxes(boxes, [fragment for fragment, _ in fragments])

    @cached_property
    def _corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop of every fragment's box, int64 [fragments, dimensions] each."""
        return _stack_corners([box for box, _ in self.fragments])


def find_patterns(source: ModelLayout, target: ModelLayout) -> list[ShardPattern]:
    """Group the tensors of the target's model into patterns, ordered by their first tensors."""
    shard_forms = _ShardForms()
    tensors_by_key: dict[Hashable, list[str]] = {}
    sizes = {}
    for spec in target.model.tensors:
        sizes[spec.name] = spec.itemsize
        key = (
            spec.shape,
            spec.itemsize,
            shard_forms.list_forms(source, spec.name),
            shard_forms.list_forms(target, spec.name),
        )
        tensors_by_key.setdefault(key, []).append(spec.name)
    return [
        ShardPattern(
            tuple(tensors),
            sizes[first_tensor],
            _group_boxes_by_rank(source, first_tensor),
            _group_boxes_by_rank(target, first_tensor),
        )
        for tensors in tensors_by_key.values()
        for first_tensor in tensors[:1]
    ]


class _ShardForms:
    """Numbers shards: those that differ only in the tensor's name get the same form number.

    A form is shape, box origins and flat range of a TensorShard.
    """

    def __init__(self) -> None:
        self._form_ids: dict[Hashable, int] = {}
        # Keyed by id(): the replicas of a layout share their shard objects.
        self._ids_by_shard: dict[int, int] = {}

    def list_forms(self, layout: ModelLayout, tensor: str) -> tuple[tuple[int, int], ...]:
        """Return (rank, form number) of every rank that stores part of a tensor.

        Tensors of the same shape with equal lists are split equally.
        """
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


def _group_boxes_by_rank(layout: ModelLayout, tensor: str) -> dict[int, tuple[TensorBox, ...]]:
    return {
        rank: tuple(boxes) for rank in layout.ranks if (boxes := layout.get_boxes(rank, tensor))
    }


def _group_by_value(values: Mapping[int, Key]) -> dict[Key, list[int]]:
    groups: dict[Key, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _stack_corners(boxes: Sequence[TensorBox]) -> tuple[np.ndarray, np.ndarray]:
    """Return start and stop of the boxes, int64 [boxes, dimensions] each."""
    start = np.array([box.start for box in boxes], dtype=np.int64)
    stop = np.array([box.stop for box in boxes], dtype=np.int64)
    return start, stop


def _has_overlap(boxes: Sequence[TensorBox]) -> bool:
    """Return True if any two of the boxes overlap."""
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
    """Split boxes where they overlap; each resulting box has the holders of all boxes around it."""
    disjoint: dict[TensorBox, tuple[int, ...]] = {}
    for box, ranks in holders.items():
        refined: dict[TensorBox, tuple[int, ...]] = {}
        for other, other_ranks in disjoint.items():
            if common := other.intersect(box):
                refined[common] = (*other_ranks, *ranks)
            refined.update(dict.fromkeys(other.subtract_box(box), other_ranks))
        refined.update(dict.fromkeys(subtract_boxes([box], disjoint), ranks))
        disjoint = refined
    return disjoint
