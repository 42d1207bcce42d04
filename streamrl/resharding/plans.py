"""Plans: what has to move from one layout to another, as data, with its bytes counted.

A CopyPlan names every box that moves and who sends it. A GatherPlan lets the ranks of a group give
each other all they hold, as an all-gather does, and each keep what it needs. Every rank makes the
plan for itself, from the same layouts, and all come to the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from streamrl.resharding.boxes import Box, remainder, total, union_numel
from streamrl.resharding.layouts import Layout
from streamrl.resharding.reports import BytesReport, Cluster, RankBytes

#: A box of a tensor, named.
Gift = tuple[str, Box]


@dataclass(frozen=True)
class Copy:
    """A box of a tensor, from the rank that has it to one that needs it; or it stays."""

    gift: Gift
    source: int
    destination: int


@dataclass(frozen=True)
class CopyPlan:
    """What every rank of `target` needs and lacks, each box from one rank that holds it."""

    source: Layout
    target: Layout
    cluster: Cluster
    copies: tuple[Copy, ...]

    def bytes_report(self) -> BytesReport:
        """What moves between the ranks, exactly the copies."""
        return _report(self.source, self.target, self.cluster, self.copies)


@dataclass(frozen=True)
class GatherPlan:
    """Groups of ranks that give each other all they hold.

    gives: what each rank contributes, by tensor; what several ranks of a group hold, only one of
    them gives. keeps_copy: the ranks keep what they gave beside the result, instead of a view.
    """

    source: Layout
    target: Layout
    cluster: Cluster
    groups: tuple[tuple[int, ...], ...]
    gives: Mapping[int, tuple[Gift, ...]]
    keeps_copy: bool = False

    @property
    def copies(self) -> Iterable[Copy]:
        """Everything that reaches a rank, needed there or not."""
        for group in self.groups:
            for source in group:
                for tensor, box in self.gives[source]:
                    for destination in group:
                        yield Copy((tensor, box), source, destination)

    def bytes_report(self) -> BytesReport:
        """What moves between the ranks: each receives all that the others of its group give."""
        return _report(
            self.source, self.target, self.cluster, self.copies, keeps_copy=self.keeps_copy
        )


def plan_copies(source: Layout, target: Layout, cluster: Cluster) -> CopyPlan:
    """The fewest bytes that turn `source` into `target`; the layouts may be of other ranks.

    What a rank holds already stays. The rest comes from a rank of the same node where one has it,
    and from the one that has sent least so far. Raises ValueError if nobody holds what is needed.
    """
    sizes = {spec.name: spec.itemsize for spec in target.model.tensors}
    sent: dict[int, int] = defaultdict(int)
    copies = []
    for tensor, itemsize in sizes.items():
        holders = _holders(source, tensor)
        for rank in target.ranks:
            for box, ranks in _found(target.boxes(rank, tensor), holders, rank):
                if not ranks:
                    raise ValueError(f"{tensor}{box}, needed by rank {rank}: no rank holds it")
                giver = min(ranks, key=lambda r: (cluster.link(r, rank) == "network", sent[r], r))
                if giver != rank:
                    sent[giver] += box.numel * itemsize
                copies.append(Copy((tensor, box), giver, rank))
    return CopyPlan(source, target, cluster, tuple(copies))


def plan_gather(
    source: Layout,
    target: Layout,
    cluster: Cluster,
    groups: Sequence[Sequence[int]],
    *,
    keeps_copy: bool = False,
) -> GatherPlan:
    """The ranks of each group give each other all they hold.

    Raises ValueError if a rank needs what its group does not hold.
    """
    sizes = {spec.name: spec.itemsize for spec in target.model.tensors}
    gives: dict[int, list[Gift]] = {rank: [] for group in groups for rank in group}
    given: dict[int, int] = defaultdict(int)
    for group in groups:
        for tensor, itemsize in sizes.items():
            holders = _holders(source, tensor, within=group)
            done: list[Box] = []
            for held, ranks in holders.items():
                for box in remainder([held], done):
                    giver = min(ranks, key=lambda rank: (given[rank], rank))
                    gives[giver].append((tensor, box))
                    given[giver] += box.numel * itemsize
                done.append(held)
            for rank in group:
                for lack in remainder(target.boxes(rank, tensor), done):
                    raise ValueError(
                        f"{tensor}{lack}, needed by rank {rank}: no rank of its group"
                        f" {list(group)} holds it"
                    )
    return GatherPlan(
        source,
        target,
        cluster,
        tuple(tuple(group) for group in groups),
        {rank: tuple(boxes) for rank, boxes in gives.items()},
        keeps_copy,
    )


def _holders(
    layout: Layout, tensor: str, within: Sequence[int] | None = None
) -> dict[Box, list[int]]:
    """Every box of a tensor that is held, with the ranks that hold just that."""
    found: dict[Box, list[int]] = {}
    for rank in layout.ranks if within is None else within:
        for box in layout.boxes(rank, tensor):
            found.setdefault(box, []).append(rank)
    return found


def _found(
    needed: Iterable[Box], holders: Mapping[Box, Sequence[int]], rank: int
) -> Iterable[tuple[Box, Sequence[int]]]:
    """Disjoint boxes that make up `needed`, each with the ranks that hold it; none are left over.

    What `rank` itself holds comes first.
    """
    own = sorted(holders, key=lambda box: rank not in holders[box])
    left = list(needed)
    for held in own:
        ranks = [rank] if rank in holders[held] else holders[held]
        for box in left:
            common = box.meet(held)
            if common:
                yield common, ranks
        left = remainder(left, [held])
        if not left:
            return
    for box in left:
        yield box, ()


def _report(
    source: Layout,
    target: Layout,
    cluster: Cluster,
    copies: Iterable[Copy],
    *,
    keeps_copy: bool = False,
) -> BytesReport:
    sizes = {spec.name: spec.itemsize for spec in target.model.tensors}
    ranks = {rank: RankBytes() for rank in sorted({*source.ranks, *target.ranks})}
    arrived: dict[int, dict[str, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        link = cluster.link(copy.source, copy.destination)
        tensor, box = copy.gift
        num_bytes = box.numel * sizes[tensor]
        ranks[copy.destination].received[link] += num_bytes
        ranks[copy.source].sent[link] += num_bytes
        arrived[copy.destination][tensor].append(box)
    for rank, counts in ranks.items():
        for tensor, itemsize in sizes.items():
            held, wanted = source.boxes(rank, tensor), target.boxes(rank, tensor)
            come = arrived[rank][tensor]
            counts.peak += itemsize * union_numel([*come, *held, *wanted])
            beside = held if keeps_copy else remainder(held, wanted)
            counts.redundant += itemsize * total(beside)
    return BytesReport(target.model.num_bytes, ranks)
