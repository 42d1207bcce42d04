"""Plans: the transfers between two layouts as data, with their bytes counted.

A CopyPlan lists every box that moves and its sender. In a GatherPlan the ranks of a group exchange
all they hold, as in an all-gather, and each keeps its part. Every rank computes the plan locally
from the same layouts; planning is deterministic, so the plans agree.

    layouts --find_patterns--> patterns --plan_copies / plan_gather--> plan
    plan --plan_copy_rounds / plan_gather_rounds--> rounds --executor--> target storage
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from streamrl.resharding.boxes import TensorBox, count_elements, subtract_boxes
from streamrl.resharding.layouts import ModelLayout, TensorShard


@dataclass(frozen=True)
class NodeTopology:
    """Division of ranks into nodes: `ranks_per_node` consecutive ranks share a node."""

    ranks_per_node: int = 8

    def get_node(self, rank: int) -> int:
        return rank // self.ranks_per_node


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: A box and the ranks that hold it.
BoxFragment = tuple[TensorBox, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class ShardPattern:
    """Tensors of the same shape and itemsize, sharded alike on every rank in both layouts.

    source_boxes, target_boxes: boxes by rank, without ranks that have none.
    """

    tensors: tuple[str, ...]
    source_boxes: Mapping[int, tuple[TensorBox, ...]]
    target_boxes: Mapping[int, tuple[TensorBox, ...]]

    def group_receivers(self, ranks: Iterable[int]) -> dict[tuple[TensorBox, ...], list[int]]:
        """Group ranks by the target boxes that they need, leaving out ranks that need none."""
        return _group_by_value(
            {rank: self.target_boxes[rank] for rank in ranks if rank in self.target_boxes}
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
    for spec in target.model.tensors:
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
            _group_boxes_by_rank(source, tensors[0]),
            _group_boxes_by_rank(target, tensors[0]),
        )
        for tensors in tensors_by_key.values()
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


#: Box of a tensor: tensor name and box.
NamedBox = tuple[str, TensorBox]


@dataclass(frozen=True)
class BoxCopy:
    """Copy of a box from rank `source` to rank `destination`; equal if the data stays in place."""

    named_box: NamedBox
    source: int
    destination: int


#: Boxes of a tensor that a rank receives, each with the rank that sends it.
BoxSources = tuple[tuple[TensorBox, int], ...]
#: Received boxes by receiving rank; ranks with equal entries share the object.
MovesByRank = Mapping[int, BoxSources]


@dataclass(frozen=True)
class CopyPlan:
    """Plan that brings every rank the boxes it needs in `target`, each from a rank that holds it.

    moves: by tensor, the boxes each rank receives; tensors with equal moves may share the object.
    """

    source: ModelLayout
    target: ModelLayout
    moves: Mapping[str, MovesByRank]

    @property
    def copies(self) -> Iterator[BoxCopy]:
        """All copies by tensor, then by rank; for each rank first the boxes that stay in place."""
        for tensor, moves in self.moves.items():
            for rank, sources in moves.items():
                for stays in (True, False):
                    for box, source in sources:
                        if (source == rank) is stays:
                            yield BoxCopy((tensor, box), source, rank)

    def count_received_bytes(self) -> dict[int, int]:
        """Return the bytes that each rank of the target receives from other ranks."""
        received = dict.fromkeys(self.target.ranks, 0)
        sizes = self.target.model.itemsizes
        for moves, tensors in _group_by_identity(self.moves):
            element_bytes = sum(sizes[tensor] for tensor in tensors)
            for sources, receivers in _group_by_identity(moves):
                amounts: Counter[int] = Counter()
                for box, source in sources:
                    amounts[source] += box.numel * element_bytes
                for rank in receivers:
                    received[rank] += amounts.total() - amounts[rank]
        return received


@dataclass(frozen=True)
class GatherPlan:
    """Plan in which the ranks of each group exchange all the weights that they hold.

    contributions: boxes that each rank sends; data that several ranks of a group hold is sent by
    one of them.
    """

    source: ModelLayout
    target: ModelLayout
    groups: tuple[tuple[int, ...], ...]
    contributions: Mapping[int, tuple[NamedBox, ...]]

    def count_sent_bytes(self) -> dict[int, int]:
        """Return the bytes that each rank sends to every other rank of its group."""
        sizes = self.target.model.itemsizes
        return {
            rank: sum(box.numel * sizes[tensor] for tensor, box in boxes)
            for rank, boxes in self.contributions.items()
        }


def plan_copies(source: ModelLayout, target: ModelLayout, cluster: NodeTopology) -> CopyPlan:
    """Return the plan that moves the fewest bytes from layout `source` to layout `target`.

    The layouts may have different ranks. Data that a rank already holds stays in place. Other data
    comes from a rank on the same node if possible, and among those from the rank that has sent
    least so far. Raises ValueError if no rank holds needed data.
    """
    sent: Counter[int] = Counter()
    patterns = find_patterns(source, target)
    pattern_by_tensor = {tensor: pattern for pattern in patterns for tensor in pattern.tensors}
    # Patterns without a choice of sender are planned once; with a choice, every tensor is planned
    # by itself, so that the senders' loads even out.
    needs: dict[ShardPattern, Mapping[int, list[BoxFragment]]] = {}
    fixed: dict[ShardPattern, tuple[MovesByRank, Counter[int]]] = {}
    moves: dict[str, MovesByRank] = {}
    for spec in target.model.tensors:
        pattern = pattern_by_tensor[spec.name]
        if pattern not in needs:
            needs[pattern] = _find_wanted(
                pattern, pattern.find_fragments(), target.ranks, "no rank"
            )
            if not _has_choice(needs[pattern]):
                pattern_sent: Counter[int] = Counter()
                fixed[pattern] = (
                    _assign_sources(needs[pattern], spec.itemsize, cluster, pattern_sent),
                    pattern_sent,
                )
        if pattern in fixed:
            moves[spec.name], pattern_sent = fixed[pattern]
            sent.update(pattern_sent)
        else:
            moves[spec.name] = _assign_sources(needs[pattern], spec.itemsize, cluster, sent)
    return CopyPlan(source, target, moves)


def plan_gather(
    source: ModelLayout, target: ModelLayout, groups: Sequence[Sequence[int]]
) -> GatherPlan:
    """Return the plan in which the ranks of each group exchange all the weights that they hold.

    Raises ValueError if a group does not hold all that its ranks need.
    """
    sizes = target.model.itemsizes
    patterns = find_patterns(source, target)
    contributions: dict[int, list[NamedBox]] = {rank: [] for group in groups for rank in group}
    sent_bytes: Counter[int] = Counter()
    for group in groups:
        fragments_by_tensor = {}
        for pattern in patterns:
            fragments = pattern.find_fragments(group)
            _find_wanted(pattern, fragments, group, f"no rank of its group {list(group)}")
            fragments_by_tensor.update(dict.fromkeys(pattern.tensors, fragments.fragments))
        for tensor, itemsize in sizes.items():
            for box, ranks in fragments_by_tensor[tensor]:
                sender = min(ranks, key=lambda rank: (sent_bytes[rank], rank))
                contributions[sender].append((tensor, box))
                sent_bytes[sender] += box.numel * itemsize
    return GatherPlan(
        source,
        target,
        tuple(tuple(group) for group in groups),
        {rank: tuple(boxes) for rank, boxes in contributions.items()},
    )


def _find_wanted(
    pattern: ShardPattern, fragments: FragmentSet, ranks: Collection[int], holder_text: str
) -> dict[int, list[BoxFragment]]:
    """Return, by rank in the order of `ranks`, the fragments that cover the boxes it needs.

    Ranks with equal needs share the list. Raises ValueError if fragments do not cover the needs;
    holder_text names the ranks that lack the data in the error.
    """
    fragments_by_boxes = {
        boxes: fragments.find_within(boxes) for boxes in pattern.group_receivers(ranks)
    }
    for boxes, receivers in pattern.group_receivers(ranks).items():
        for missing in fragments.find_missing(boxes, fragments_by_boxes[boxes]):
            raise ValueError(
                f"{pattern.tensors[0]}{missing}, needed by rank {receivers[0]}:"
                f" {holder_text} holds it"
            )
    return {
        rank: fragments_by_boxes[pattern.target_boxes[rank]]
        for rank in ranks
        if rank in pattern.target_boxes
    }


def _has_choice(needs: Mapping[int, list[BoxFragment]]) -> bool:
    """Return True if any rank may receive a fragment from more than one sender."""
    return any(
        len(holders) > 1 and rank not in holders
        for rank, fragments in needs.items()
        for _, holders in fragments
    )


def _assign_sources(
    needs: Mapping[int, list[BoxFragment]], itemsize: int, cluster: NodeTopology, sent: Counter[int]
) -> MovesByRank:
    """Choose the sender of every fragment, and return the boxes each rank receives.

    Adds the bytes to `sent`, the bytes that each rank sends.
    """
    shared_sources: dict[tuple[int, tuple[int, ...]], BoxSources] = {}
    moves = {}
    for rank, fragments in needs.items():
        senders = []
        for box, holders in fragments:
            sender = _choose_source(holders, rank, cluster, sent)
            if sender != rank:
                sent[sender] += box.numel * itemsize
            senders.append(sender)
        key = (id(fragments), tuple(senders))
        if key not in shared_sources:
            boxes = (box for box, _ in fragments)
            shared_sources[key] = tuple(zip(boxes, senders, strict=True))
        moves[rank] = shared_sources[key]
    return moves


def _choose_source(
    holders: Sequence[int], rank: int, cluster: NodeTopology, sent: Mapping[int, int]
) -> int:
    """Return the rank to receive from: `rank` itself, else on its node, else least sent so far."""
    if rank in holders:
        return rank
    if len(holders) == 1:
        return holders[0]
    return min(holders, key=lambda r: (cluster.get_node(r) != cluster.get_node(rank), sent[r], r))


def _group_by_identity(objects: Mapping[Key, Value]) -> list[tuple[Value, list[Key]]]:
    """Return every distinct object, compared by id(), with the keys that map to it."""
    groups: dict[int, tuple[Value, list[Key]]] = {}
    for key, value in objects.items():
        groups.setdefault(id(value), (value, []))[1].append(key)
    return list(groups.values())
