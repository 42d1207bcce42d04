"""Plans made the plain way, box by box and rank by rank: what the quick ones must come to."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from streamrl.resharding.boxes import Box, remainder, total, union_numel
from streamrl.resharding.byte_report import LINKS, Nodes
from streamrl.resharding.layouts import Layout
from streamrl.resharding.plans import Copy, Gift


def copies(source: Layout, target: Layout, cluster: Nodes) -> list[Copy]:
    """Where no two ranks hold boxes that overlap without being equal."""
    sent: Counter[int] = Counter()
    made = []
    for spec in target.model.tensors:
        holders = _holders(source, spec.name, source.ranks)
        for rank in target.ranks:
            left = target.boxes(rank, spec.name)
            for held in sorted(holders, key=lambda box: rank not in holders[box]):
                ranks = [rank] if rank in holders[held] else holders[held]
                for common in (box.meet(held) for box in left):
                    if common:
                        giver = min(
                            ranks, key=lambda r: (cluster.link(r, rank) == "network", sent[r], r)
                        )
                        if giver != rank:
                            sent[giver] += common.numel * spec.itemsize
                        made.append(Copy((spec.name, common), giver, rank))
                left = remainder(left, [held])
            assert not left
    return made


def gives(source: Layout, groups: Sequence[Sequence[int]]) -> dict[int, tuple[Gift, ...]]:
    """What each rank of each group gives."""
    given: Counter[int] = Counter()
    made: dict[int, list[Gift]] = {rank: [] for group in groups for rank in group}
    for group in groups:
        for spec in source.model.tensors:
            done: list[Box] = []
            for held, ranks in _holders(source, spec.name, group).items():
                for box in remainder([held], done):
                    giver = min(ranks, key=lambda rank: (given[rank], rank))
                    made[giver].append((spec.name, box))
                    given[giver] += box.numel * spec.itemsize
                done.append(held)
    return {rank: tuple(gifts) for rank, gifts in made.items()}


def report(
    source: Layout, target: Layout, cluster: Nodes, made: Iterable[Copy], *, keeps_copy: bool
) -> dict[int, tuple[dict[str, int], dict[str, int], int, int]]:
    """Of every rank what it receives and sends by link, its peak and what it keeps twice."""
    sizes = {spec.name: spec.itemsize for spec in target.model.tensors}
    ranks = sorted({*source.ranks, *target.ranks})
    received = {rank: dict.fromkeys(LINKS, 0) for rank in ranks}
    sent = {rank: dict.fromkeys(LINKS, 0) for rank in ranks}
    arrived: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for copy in made:
        tensor, box = copy.gift
        link = cluster.link(copy.source, copy.destination)
        received[copy.destination][link] += box.numel * sizes[tensor]
        sent[copy.source][link] += box.numel * sizes[tensor]
        arrived[copy.destination, tensor].append(box)
    found = {}
    for rank in ranks:
        peak = redundant = 0
        for tensor, itemsize in sizes.items():
            held, wanted = source.boxes(rank, tensor), target.boxes(rank, tensor)
            peak += itemsize * union_numel([*arrived[rank, tensor], *held, *wanted])
            redundant += itemsize * total(held if keeps_copy else remainder(held, wanted))
        found[rank] = (received[rank], sent[rank], peak, redundant)
    return found


def _holders(layout: Layout, tensor: str, ranks: Iterable[int]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for rank in ranks:
        for box in layout.boxes(rank, tensor):
            found.setdefault(box, []).append(rank)
    return found
