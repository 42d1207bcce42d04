"""Plans: the transfers between two layouts as data, with their bytes counted.

A CopyPlan lists every box that moves and its sender. In a GatherPlan the ranks of a group exchange
all they hold, as in an all-gather, and each keeps its part. Every rank computes the plan locally
from the same layouts; planning is deterministic, so the plans agree.

    layouts --find_patterns--> patterns --plan_copies / plan_gather--> plan
    plan --plan_copy_rounds / plan_gather_rounds--> rounds --executor--> target storage
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from streamrl.resharding.boxes import TensorBox, count_elements, is_nested, subtract_boxes
from streamrl.resharding.byte_report import BytesReport, NodeTopology, RankBytes, count_transfers
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.shard_patterns import BoxFragment, FragmentSet, ShardPattern, find_patterns

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

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
    cluster: NodeTopology
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

    def report_bytes(self) -> BytesReport:
        """Count the bytes that each rank sends, receives and holds if these copies are made."""
        ranks = _count_held_bytes(self.source, self.target)
        sizes = _get_itemsizes(self.target)
        for moves, tensors in _group_by_identity(self.moves):
            element_bytes = sum(sizes[tensor] for tensor in tensors)
            for sources, receivers in _group_by_identity(moves):
                amounts: dict[int, int] = defaultdict(int)
                for box, source in sources:
                    amounts[source] += box.numel * element_bytes
                count_transfers(ranks, self.cluster, amounts, set(receivers))
        return BytesReport(self.target.model.num_bytes, ranks)


@dataclass(frozen=True)
class GatherPlan:
    """Plan in which the ranks of each group exchange all the weights that they hold.

    contributions: boxes that each rank sends; data that several ranks of a group hold is sent by
    one of them. keeps_copy: ranks keep their contribution beside the result, instead of a view.
    """

    source: ModelLayout
    target: ModelLayout
    cluster: NodeTopology
    groups: tuple[tuple[int, ...], ...]
    contributions: Mapping[int, tuple[NamedBox, ...]]
    keeps_copy: bool = False

    def report_bytes(self) -> BytesReport:
        """Count the bytes that each rank sends, receives and holds.

        Each rank receives the contributions of all others in its group.
        """
        ranks = _count_held_bytes(self.source, self.target, keeps_copy=self.keeps_copy)
        sizes = _get_itemsizes(self.target)
        for group in self.groups:
            amounts = {
                rank: sum(box.numel * sizes[tensor] for tensor, box in self.contributions[rank])
                for rank in group
            }
            count_transfers(ranks, self.cluster, amounts, set(group))
            for rank in group:
                # The gathered data includes all that the rank needs.
                ranks[rank].peak_bytes = sum(amounts.values())
        return BytesReport(self.target.model.num_bytes, ranks)


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
    return CopyPlan(source, target, cluster, moves)


def plan_gather(
    source: ModelLayout,
    target: ModelLayout,
    cluster: NodeTopology,
    groups: Sequence[Sequence[int]],
    *,
    keeps_copy: bool = False,
) -> GatherPlan:
    """Return the plan in which the ranks of each group exchange all the weights that they hold.

    keeps_copy: ranks keep their source shards beside the result, instead of a view. Raises
    ValueError if a group does not hold all that its ranks need, or a rank is not in exactly one
    group.
    """
    sizes = _get_itemsizes(target)
    patterns = find_patterns(source, target)
    group_counts = Counter(rank for group in groups for rank in group)
    misplaced = [rank for rank in {*group_counts, *target.shards} if group_counts[rank] != 1]
    if misplaced:
        rank = min(misplaced)
        raise ValueError(f"rank {rank}: is in {group_counts[rank]} groups, must be in exactly one")
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
        cluster,
        tuple(tuple(group) for group in groups),
        {rank: tuple(boxes) for rank, boxes in contributions.items()},
        keeps_copy,
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
    return min(holders, key=lambda r: (cluster.get_link(r, rank) == "network", sent[r], r))


def _count_held_bytes(
    source: ModelLayout, target: ModelLayout, *, keeps_copy: bool = False
) -> dict[int, RankBytes]:
    """Return the bytes that every rank holds of both layouts, before any transfer is counted."""
    ranks = {rank: RankBytes() for rank in sorted({*source.ranks, *target.ranks})}
    for pattern in find_patterns(source, target):
        for (source_boxes, target_boxes), pattern_ranks in pattern.ranks_by_boxes.items():
            num_redundant = count_elements(subtract_boxes(source_boxes, target_boxes))
            num_memory = count_elements(source_boxes) + count_elements(target_boxes)
            if not keeps_copy and (
                is_nested(source_boxes, target_boxes) or is_nested(target_boxes, source_boxes)
            ):
                num_memory = max(count_elements(source_boxes), count_elements(target_boxes))
            for rank in pattern_ranks:
                counts = ranks[rank]
                counts.peak_bytes += (
                    num_redundant + count_elements(target_boxes)
                ) * pattern.element_bytes
                counts.redundant_bytes += (
                    count_elements(source_boxes) if keeps_copy else num_redundant
                ) * pattern.element_bytes
                counts.memory_bytes += num_memory * pattern.element_bytes
    return ranks


def _get_itemsizes(layout: ModelLayout) -> dict[str, int]:
    return {spec.name: spec.itemsize for spec in layout.model.tensors}


def _group_by_identity(objects: Mapping[Key, Value]) -> list[tuple[Value, list[Key]]]:
    """Return every distinct object, compared by id(), with the keys that map to it."""
    groups: dict[int, tuple[Value, list[Key]]] = {}
    for key, value in objects.items():
        groups.setdefault(id(value), (value, []))[1].append(key)
    return list(groups.values())
