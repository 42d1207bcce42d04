"""Plans: what has to move from one layout to another, as data, with its bytes counted.

A CopyPlan names every box that moves and who sends it. A GatherPlan lets the ranks of a group give
each other all they hold, as an all-gather does, and each keep what it needs. Every rank makes the
plan for itself, from the same layouts, and all come to the same.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from streamrl.resharding.boxes import TensorBox, count_elements, is_nested, subtract_boxes
from streamrl.resharding.byte_report import BytesReport, NodeTopology, RankBytes, count_transfers
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.patterns import BoxFragment, FragmentSet, ShardPattern, find_patterns

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: A box of a tensor, named.
NamedBox = tuple[str, TensorBox]


@dataclass(frozen=True)
class BoxCopy:
    """A box of a tensor, from the rank that has it to one that needs it; or it stays."""

    named_box: NamedBox
    source: int
    destination: int


#: The boxes of a tensor that one rank gets, and who gives each.
BoxSources = tuple[tuple[TensorBox, int], ...]
#: What every rank gets of a tensor; those that get the same from the same have one object.
MovesByRank = Mapping[int, BoxSources]


@dataclass(frozen=True)
class CopyPlan:
    """What every rank of `target` needs and lacks, each box from one rank that holds it.

    moves: by tensor; tensors that are cut alike may have one object.
    """

    source: ModelLayout
    target: ModelLayout
    cluster: NodeTopology
    moves: Mapping[str, MovesByRank]

    @property
    def copies(self) -> Iterator[BoxCopy]:
        """Every copy: by tensors, then by ranks, and of each first what stays where it is."""
        for tensor, moves in self.moves.items():
            for rank, gifts in moves.items():
                for at_home in (True, False):
                    for box, giver in gifts:
                        if (giver == rank) is at_home:
                            yield BoxCopy((tensor, box), giver, rank)

    def report_bytes(self) -> BytesReport:
        """What moves between the ranks, exactly the copies."""
        ranks = _count_held_bytes(self.source, self.target)
        sizes = _get_itemsizes(self.target)
        for moves, tensors in _group_by_identity(self.moves):
            each = sum(sizes[tensor] for tensor in tensors)
            for gifts, takers in _group_by_identity(moves):
                amounts: dict[int, int] = defaultdict(int)
                for box, giver in gifts:
                    amounts[giver] += box.numel * each
                count_transfers(ranks, self.cluster, amounts, set(takers))
        return BytesReport(self.target.model.num_bytes, ranks)


@dataclass(frozen=True)
class GatherPlan:
    """Groups of ranks that give each other all they hold.

    gives: what each rank contributes, by tensor; what several ranks of a group hold, only one of
    them gives. keeps_copy: the ranks keep what they gave beside the result, instead of a view.
    """

    source: ModelLayout
    target: ModelLayout
    cluster: NodeTopology
    groups: tuple[tuple[int, ...], ...]
    contributions: Mapping[int, tuple[NamedBox, ...]]
    keeps_copy: bool = False

    @property
    def copies(self) -> Iterator[BoxCopy]:
        """Everything that reaches a rank, needed there or not."""
        for group in self.groups:
            for source in group:
                for tensor, box in self.contributions[source]:
                    for destination in group:
                        yield BoxCopy((tensor, box), source, destination)

    def report_bytes(self) -> BytesReport:
        """What moves between the ranks: each receives all that the others of its group give."""
        ranks = _count_held_bytes(self.source, self.target, keeps_copy=self.keeps_copy)
        sizes = _get_itemsizes(self.target)
        for group in self.groups:
            amounts = {
                rank: sum(box.numel * sizes[tensor] for tensor, box in self.contributions[rank])
                for rank in group
            }
            count_transfers(ranks, self.cluster, amounts, set(group))
            for rank in group:
                # All that any of them holds; what they want is among it.
                ranks[rank].peak_bytes = sum(amounts.values())
        return BytesReport(self.target.model.num_bytes, ranks)


def plan_copies(source: ModelLayout, target: ModelLayout, cluster: NodeTopology) -> CopyPlan:
    """The fewest bytes that turn `source` into `target`; the layouts may be of other ranks.

    What a rank holds already stays. The rest comes from a rank of the same node where one has it,
    and from the one that has sent least so far. Raises ValueError if nobody holds what is needed.
    """
    sent: Counter[int] = Counter()
    found = find_patterns(source, target)
    of_tensor = {tensor: pattern for pattern in found for tensor in pattern.tensors}
    wants: dict[ShardPattern, Mapping[int, list[BoxFragment]]] = {}
    settled: dict[ShardPattern, tuple[MovesByRank, Counter[int]]] = {}
    moves: dict[str, MovesByRank] = {}
    for spec in target.model.tensors:
        pattern = of_tensor[spec.name]
        if pattern not in wants:
            wants[pattern] = _find_wanted(
                pattern, pattern.find_fragments(), target.ranks, "no rank"
            )
            if not _has_choice(wants[pattern]):
                own: Counter[int] = Counter()
                settled[pattern] = _assign_sources(wants[pattern], spec.itemsize, cluster, own), own
        if pattern in settled:
            moves[spec.name], own = settled[pattern]
            sent.update(own)
        else:
            moves[spec.name] = _assign_sources(wants[pattern], spec.itemsize, cluster, sent)
    return CopyPlan(source, target, cluster, moves)


def plan_gather(
    source: ModelLayout,
    target: ModelLayout,
    cluster: NodeTopology,
    groups: Sequence[Sequence[int]],
    *,
    keeps_copy: bool = False,
) -> GatherPlan:
    """The ranks of each group give each other all they hold.

    Raises ValueError if a rank needs what its group does not hold, or is in no group or in several.
    """
    sizes = _get_itemsizes(target)
    found = find_patterns(source, target)
    times = Counter(rank for group in groups for rank in group)
    wrong = [rank for rank in {*times, *target.shards} if times[rank] != 1]
    if wrong:
        raise ValueError(f"rank {min(wrong)}: is {times[min(wrong)]} times in the groups, not once")
    gives: dict[int, list[NamedBox]] = {rank: [] for group in groups for rank in group}
    given: Counter[int] = Counter()
    for group in groups:
        held = {}
        for pattern in found:
            fragments = pattern.find_fragments(group)
            _find_wanted(pattern, fragments, group, f"no rank of its group {list(group)}")
            held.update(dict.fromkeys(pattern.tensors, fragments.fragments))
        for tensor, itemsize in sizes.items():
            for box, ranks in held[tensor]:
                giver = min(ranks, key=lambda rank: (given[rank], rank))
                gives[giver].append((tensor, box))
                given[giver] += box.numel * itemsize
    return GatherPlan(
        source,
        target,
        cluster,
        tuple(tuple(group) for group in groups),
        {rank: tuple(boxes) for rank, boxes in gives.items()},
        keeps_copy,
    )


def _find_wanted(
    pattern: ShardPattern, fragments: FragmentSet, ranks: Collection[int], nobody: str
) -> dict[int, list[BoxFragment]]:
    """Of each of these ranks, the fragments that make up what it wants, in the order of the ranks.

    Ranks that want the same have the same list. Raises ValueError where there are not enough.
    """
    found = {boxes: fragments.find_within(boxes) for boxes in pattern.group_receivers(ranks)}
    for boxes, takers in pattern.group_receivers(ranks).items():
        for lack in fragments.find_missing(boxes, found[boxes]):
            raise ValueError(
                f"{pattern.tensors[0]}{lack}, needed by rank {takers[0]}: {nobody} holds it"
            )
    return {
        rank: found[pattern.target_boxes[rank]] for rank in ranks if rank in pattern.target_boxes
    }


def _has_choice(wants: Mapping[int, list[BoxFragment]]) -> bool:
    """Whether any rank may get something from one or another."""
    return any(
        len(holders) > 1 and rank not in holders
        for rank, fragments in wants.items()
        for _, holders in fragments
    )


def _assign_sources(
    wants: Mapping[int, list[BoxFragment]], itemsize: int, cluster: NodeTopology, sent: Counter[int]
) -> MovesByRank:
    """Who gives what; `sent`, the bytes that each rank has sent so far, goes up."""
    made: dict[tuple[int, tuple[int, ...]], BoxSources] = {}
    moves = {}
    for rank, fragments in wants.items():
        givers = []
        for box, holders in fragments:
            giver = _choose_source(holders, rank, cluster, sent)
            if giver != rank:
                sent[giver] += box.numel * itemsize
            givers.append(giver)
        key = (id(fragments), tuple(givers))
        if key not in made:
            boxes = (box for box, _ in fragments)
            made[key] = tuple(zip(boxes, givers, strict=True))
        moves[rank] = made[key]
    return moves


def _choose_source(
    holders: Sequence[int], rank: int, cluster: NodeTopology, sent: Mapping[int, int]
) -> int:
    if rank in holders:
        return rank
    if len(holders) == 1:
        return holders[0]
    return min(holders, key=lambda r: (cluster.get_link(r, rank) == "network", sent[r], r))


def _count_held_bytes(
    source: ModelLayout, target: ModelLayout, *, keeps_copy: bool = False
) -> dict[int, RankBytes]:
    """What every rank holds of both layouts and what it keeps twice; nothing has moved yet."""
    ranks = {rank: RankBytes() for rank in sorted({*source.ranks, *target.ranks})}
    for pattern in find_patterns(source, target):
        for (held, wanted), alike in pattern.ranks_by_boxes.items():
            beside = count_elements(subtract_boxes(held, wanted))
            memory = count_elements(held) + count_elements(wanted)
            if not keeps_copy and (is_nested(held, wanted) or is_nested(wanted, held)):
                memory = max(count_elements(held), count_elements(wanted))
            for rank in alike:
                counts = ranks[rank]
                counts.peak_bytes += (beside + count_elements(wanted)) * pattern.element_bytes
                counts.redundant_bytes += (
                    count_elements(held) if keeps_copy else beside
                ) * pattern.element_bytes
                counts.memory_bytes += memory * pattern.element_bytes
    return ranks


def _get_itemsizes(layout: ModelLayout) -> dict[str, int]:
    return {spec.name: spec.itemsize for spec in layout.model.tensors}


def _group_by_identity(objects: Mapping[Key, Value]) -> list[tuple[Value, list[Key]]]:
    """Every object, with the keys it has."""
    found: dict[int, tuple[Value, list[Key]]] = {}
    for key, each in objects.items():
        found.setdefault(id(each), (each, []))[1].append(key)
    return list(found.values())
