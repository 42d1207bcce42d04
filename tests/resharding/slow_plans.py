"""Straightforward reference plans, box by box and rank by rank."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from streamrl.resharding.boxes import TensorBox, count_elements, subtract_boxes
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.plans import LINK_KINDS, BoxCopy, NamedBox, NodeTopology
from tests.resharding.models import count_union_elements


def plan_copies(source: ModelLayout, target: ModelLayout, cluster: NodeTopology) -> list[BoxCopy]:
    """Plan copies, if boxes of different ranks are equal or disjoint."""
    sent: Counter[int] = Counter()
    planned = []
    for spec in target.model.tensors:
        holders = _list_holders(source, spec.name, source.ranks)
        for rank in target.ranks:
            missing = target.get_boxes(rank, spec.name)
            for held_box in sorted(holders, key=lambda box: rank not in holders[box]):
                ranks = [rank] if rank in holders[held_box] else holders[held_box]
                for common in (box.intersect(held_box) for box in missing):
                    if common:
                        source_rank = min(
                            ranks,
                            key=lambda r: (cluster.get_link(r, rank) == "network", sent[r], r),
                        )
                        if source_rank != rank:
                            sent[source_rank] += common.numel * spec.itemsize
                        planned.append(BoxCopy((spec.name, common), source_rank, rank))
                missing = subtract_boxes(missing, [held_box])
            assert not missing
    return planned


def plan_contributions(
    source: ModelLayout, groups: Sequence[Sequence[int]]
) -> dict[int, tuple[NamedBox, ...]]:
    """Return the contribution of each rank of each group."""
    sent_bytes: Counter[int] = Counter()
    contributions: dict[int, list[NamedBox]] = {rank: [] for group in groups for rank in group}
    for group in groups:
        for spec in source.model.tensors:
            done: list[TensorBox] = []
            for held_box, ranks in _list_holders(source, spec.name, group).items():
                for box in subtract_boxes([held_box], done):
                    sender = min(ranks, key=lambda rank: (sent_bytes[rank], rank))
                    contributions[sender].append((spec.name, box))
                    sent_bytes[sender] += box.numel * spec.itemsize
                done.append(held_box)
    return {rank: tuple(gifts) for rank, gifts in contributions.items()}


def report_bytes(
    source: ModelLayout,
    target: ModelLayout,
    cluster: NodeTopology,
    copies: Iterable[BoxCopy],
    *,
    keeps_copy: bool,
) -> dict[int, tuple[dict[str, int], dict[str, int], int, int]]:
    """Return bytes received and sent by link, peak and redundant bytes of every rank."""
    sizes = {spec.name: spec.itemsize for spec in target.model.tensors}
    ranks = sorted({*source.ranks, *target.ranks})
    received = {rank: dict.fromkeys(LINK_KINDS, 0) for rank in ranks}
    sent = {rank: dict.fromkeys(LINK_KINDS, 0) for rank in ranks}
    received_boxes: dict[tuple[int, str], list[TensorBox]] = defaultdict(list)
    for copy in copies:
        tensor, box = copy.named_box
        link = cluster.get_link(copy.source, copy.destination)
        received[copy.destination][link] += box.numel * sizes[tensor]
        sent[copy.source][link] += box.numel * sizes[tensor]
        received_boxes[copy.destination, tensor].append(box)
    counts_by_rank = {}
    for rank in ranks:
        peak = redundant = 0
        for tensor, itemsize in sizes.items():
            source_boxes, target_boxes = (
                source.get_boxes(rank, tensor),
                target.get_boxes(rank, tensor),
            )
            peak += itemsize * count_union_elements(
                [*received_boxes[rank, tensor], *source_boxes, *target_boxes]
            )
            redundant += itemsize * count_elements(
                source_boxes if keeps_copy else subtract_boxes(source_boxes, target_boxes)
            )
        counts_by_rank[rank] = (received[rank], sent[rank], peak, redundant)
    return counts_by_rank


def _list_holders(
    layout: ModelLayout, tensor: str, ranks: Iterable[int]
) -> dict[TensorBox, list[int]]:
    holders: dict[TensorBox, list[int]] = {}
    for rank in ranks:
        for box in layout.get_boxes(rank, tensor):
            holders.setdefault(box, []).append(rank)
    return holders
