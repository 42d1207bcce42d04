"""Plans made the plain way, box by box and rank by rank: what the quick ones must come to."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from streamrl.resharding.boxes import (
    TensorBox,
    count_elements,
    count_union_elements,
    subtract_boxes,
)
from streamrl.resharding.byte_report import LINK_KINDS, NodeTopology
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.plans import BoxCopy, NamedBox


def copies(source: ModelLayout, target: ModelLayout, cluster: NodeTopology) -> list[BoxCopy]:
    """Where no two ranks hold boxes that overlap without being equal."""
    sent: Counter[int] = Counter()
    made = []
    for spec in target.model.tensors:
        holders = _holders(source, spec.name, source.ranks)
        for rank in target.ranks:
            left = target.get_boxes(rank, spec.name)
            for held in sorted(holders, key=lambda box: rank not in holders[box]):
                ranks = [rank] if rank in holders[held] else holders[held]
                for common in (box.intersect(held) for box in left):
                    if common:
                        giver = min(
                            ranks,
                            key=lambda r: (cluster.get_link(r, rank) == "network", sent[r], r),
                        )
                        if giver != rank:
                            sent[giver] += common.numel * spec.itemsize
                        made.append(BoxCopy((spec.name, common), giver, rank))
                left = subtract_boxes(left, [held])
            assert not left
    return made


def gives(source: ModelLayout, groups: Sequence[Sequence[int]]) -> dict[int, tuple[NamedBox, ...]]:
    """What each rank of each group gives."""
    given: Counter[int] = Counter()
    made: dict[int, list[NamedBox]] = {rank: [] for group in groups for rank in group}
    for group in groups:
        for spec in source.model.tensors:
            done: list[TensorBox] = []
            for held, ranks in _holders(source, spec.name, group).items():
                for box in subtract_boxes([held], done):
                    giver = min(ranks, key=lambda rank: (given[rank], rank))
                    made[giver].append((spec.name, box))
                    given[giver] += box.numel * spec.itemsize
                done.append(held)
    return {rank: tuple(gifts) for rank, gifts in made.items()}


def report(
    source: ModelLayout,
    target: ModelLayout,
    cluster: NodeTopology,
    made: Iterable[BoxCopy],
    *,
    keeps_copy: bool,
) -> dict[int, tuple[dict[str, int], dict[str, int], int, int]]:
    """Of every rank what it receives and sends by link, its peak and what it keeps twice."""
    sizes = {spec.name: spec.itemsize for spec in target.model.tensors}
    ranks = sorted({*source.ranks, *target.ranks})
    received = {rank: dict.fromkeys(LINK_KINDS, 0) for rank in ranks}
    sent = {rank: dict.fromkeys(LINK_KINDS, 0) for rank in ranks}
    arrived: dict[tuple[int, str], list[TensorBox]] = defaultdict(list)
    for copy in made:
        tensor, box = copy.named_box
        link = cluster.get_link(copy.source, copy.destination)
        received[copy.destination][link] += box.numel * sizes[tensor]
        sent[copy.source][link] += box.numel * sizes[tensor]
        arrived[copy.destination, tensor].append(box)
    found = {}
    for rank in ranks:
        peak = redundant = 0
        for tensor, itemsize in sizes.items():
            held, wanted = source.get_boxes(rank, tensor), target.get_boxes(rank, tensor)
            peak += itemsize * count_union_elements([*arrived[rank, tensor], *held, *wanted])
            redundant += itemsize * count_elements(
                held if keeps_copy else subtract_boxes(held, wanted)
            )
        found[rank] = (received[rank], sent[rank], peak, redundant)
    return found


def _holders(layout: ModelLayout, tensor: str, ranks: Iterable[int]) -> dict[TensorBox, list[int]]:
    found: dict[TensorBox, list[int]] = {}
    for rank in ranks:
        for box in layout.get_boxes(rank, tensor):
            found.setdefault(box, []).append(rank)
    return found
