"""Cutting a plan into rounds, so that what is under way at once stays bounded."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from streamrl.resharding.boxes import Box
from streamrl.resharding.plans import Copy, Gift

#: Without a bound everything goes in one round.
UNBOUNDED = 1 << 62


def cut(box: Box, max_numel: int) -> Iterator[Box]:
    """Disjoint boxes of at most `max_numel` elements that make up `box`, in row-major order."""
    if box.numel <= max_numel:
        yield box
        return
    dim = next(i for i, size in enumerate(box.shape) if size > 1)
    row = box.numel // box.shape[dim]
    step = max(1, max_numel // row)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        yield from cut(box.narrow(dim, start, stop), max_numel)


def copy_rounds(
    copies: Iterable[Copy], itemsizes: Mapping[str, int], bucket_bytes: int
) -> list[list[Copy]]:
    """The copies between ranks, in rounds: none sends or receives more than `bucket_bytes` in one.

    Copies that are larger are cut. bucket_bytes: at least the largest itemsize.
    """
    rounds: list[list[Copy]] = []
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    # The first round in which a rank may still have room.
    opens: dict[tuple[str, int], int] = defaultdict(int)
    for copy in copies:
        if copy.source == copy.destination:
            continue
        tensor, whole = copy.gift
        itemsize = itemsizes[tensor]
        for box in cut(whole, max(1, bucket_bytes // itemsize)):
            size = box.numel * itemsize
            at = max(opens["from", copy.source], opens["to", copy.destination])
            while max(sent[at, copy.source], received[at, copy.destination]) + size > bucket_bytes:
                at += 1
            sent[at, copy.source] += size
            received[at, copy.destination] += size
            for side, rank, used in (
                ("from", copy.source, sent),
                ("to", copy.destination, received),
            ):
                while used[opens[side, rank], rank] >= bucket_bytes:
                    opens[side, rank] += 1
            while len(rounds) <= at:
                rounds.append([])
            rounds[at].append(replace(copy, gift=(tensor, box)))
    return rounds


def gift_rounds(
    gives: Sequence[Gift], itemsizes: Mapping[str, int], max_bytes: int
) -> list[list[Gift]]:
    """What one rank gives its group, in order, in rounds of at most `max_bytes`."""
    rounds: list[list[Gift]] = []
    room = 0
    for tensor, whole in gives:
        itemsize = itemsizes[tensor]
        for box in cut(whole, max(1, max_bytes // itemsize)):
            size = box.numel * itemsize
            if not rounds or size > room:
                rounds.append([])
                room = max_bytes
            rounds[-1].append((tensor, box))
            room -= size
    return rounds


def gather_rounds(
    gives: Sequence[Sequence[Gift]], itemsizes: Mapping[str, int], bucket_bytes: int
) -> list[list[list[Gift]]]:
    """What each rank of a group gives in each round, all of them at most `bucket_bytes`."""
    each = bucket_bytes // max(1, len(gives))
    gifts = [gift_rounds(given, itemsizes, each) for given in gives]
    return [list(at) for at in zip_longest(*gifts, fillvalue=[])]


def parcel_bytes(gives: Sequence[Sequence[Gift]], itemsizes: Mapping[str, int]) -> int:
    """What each rank of a group gives in a round: as much as the largest, and a whole number of the
    widest elements, so that every parcel behind another can be viewed."""
    largest = max(sum(box.numel * itemsizes[tensor] for tensor, box in given) for given in gives)
    widest = max(itemsizes.values())
    return -(-largest // widest) * widest


def padding_bytes(rounds: Iterable[Sequence[Sequence[Gift]]], itemsizes: Mapping[str, int]) -> int:
    """What the ranks of a group give besides in these rounds."""
    padding = 0
    for gives in rounds:
        given = sum(box.numel * itemsizes[tensor] for each in gives for tensor, box in each)
        padding += parcel_bytes(gives, itemsizes) * len(gives) - given
    return padding
