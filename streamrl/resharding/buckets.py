"""Cutting a plan into rounds, so that what is under way at once stays bounded."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.plans import BoxCopy, NamedBox

#: Without a bound everything goes in one round.
UNBOUNDED_BYTES = 1 << 62


def split_box(box: TensorBox, max_numel: int) -> Iterator[TensorBox]:
    """Disjoint boxes of at most `max_numel` elements that make up `box`, in row-major order."""
    if box.numel <= max_numel:
        yield box
        return
    dim = next(i for i, size in enumerate(box.shape) if size > 1)
    row = box.numel // box.shape[dim]
    step = max(1, max_numel // row)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        yield from split_box(box.narrow(dim, start, stop), max_numel)


def plan_copy_rounds(
    copies: Iterable[BoxCopy], itemsizes: Mapping[str, int], bucket_bytes: int
) -> list[list[BoxCopy]]:
    """The copies between ranks, in rounds: none sends or receives more than `bucket_bytes` in one.

    Copies that are larger are cut. bucket_bytes: at least the largest itemsize.
    """
    rounds: list[list[BoxCopy]] = []
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    # The first round in which a rank may still have room.
    opens: dict[tuple[str, int], int] = defaultdict(int)
    for copy in copies:
        if copy.source == copy.destination:
            continue
        tensor, whole = copy.named_box
        itemsize = itemsizes[tensor]
        for box in split_box(whole, max(1, bucket_bytes // itemsize)):
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
            rounds[at].append(copy if box is whole else replace(copy, named_box=(tensor, box)))
    return rounds


@dataclass(frozen=True)
class GatherRound:
    """What each rank of a group gives in one round, how many bytes, and where they go in a buffer.

    Where all give as much (`is_even`) it is an all-gather, else a broadcast from each that gives.
    """

    contributions: tuple[tuple[NamedBox, ...], ...]
    contribution_bytes: tuple[int, ...]
    buffer_offsets: tuple[int, ...]
    is_even: bool

    @property
    def buffer_bytes(self) -> int:
        """What a rank needs for all of it, and for its own besides where it is an all-gather."""
        return self.buffer_offsets[-1] + self.contribution_bytes[-1] * (1 + self.is_even)


def plan_gather_rounds(
    gives: Sequence[Sequence[NamedBox]], itemsizes: Mapping[str, int], bucket_bytes: int
) -> list[GatherRound]:
    """Rounds of at most a bucket in which the ranks of a group give each other what they have.

    They are even as long as all have something left; nothing is given to fill one up.
    bucket_bytes: at least the widest element of each rank.
    """
    widest = max(itemsizes.values())
    streams = [_BoxStream(given, itemsizes) for given in gives]
    even = min(stream.remaining_bytes for stream in streams) // widest * widest
    rounds = []
    while giving := sum(stream.remaining_bytes > 0 for stream in streams):
        each = bucket_bytes // (len(streams) if even else giving) // widest * widest
        size = min(each, even) if even else each
        left = [stream.remaining_bytes for stream in streams]
        given = tuple(stream.take_bytes(size) for stream in streams)
        sizes = tuple(
            was - stream.remaining_bytes for was, stream in zip(left, streams, strict=True)
        )
        # Each parcel begins where its widest elements can be viewed.
        starts = accumulate((-(-taken // widest) * widest for taken in sizes[:-1]), initial=0)
        rounds.append(GatherRound(given, sizes, tuple(starts), is_even=even > 0))
        even -= size if even else 0
    return rounds


class _BoxStream:
    """Gifts in turn, of which so many bytes can be taken; num_bytes: what is left.

    Wider elements come first, and all widths are powers of two: a multiple of the widest never ends
    within an element.
    """

    def __init__(self, gifts: Sequence[NamedBox], itemsizes: Mapping[str, int]) -> None:
        self._pending_boxes = deque(sorted(gifts, key=lambda gift: -itemsizes[gift[0]]))
        self._itemsizes = itemsizes
        self.remaining_bytes = sum(box.numel * itemsizes[tensor] for tensor, box in gifts)

    def take_bytes(self, num_bytes: int) -> tuple[NamedBox, ...]:
        """The next of them, cut where the last one is too large."""
        taken: list[NamedBox] = []
        room = min(num_bytes, self.remaining_bytes)
        self.remaining_bytes -= room
        while room:
            tensor, box = self._pending_boxes.popleft()
            stop = min(box.numel, room // self._itemsizes[tensor])
            taken.extend((tensor, part) for part in box.iter_flat_range(0, stop))
            rest = [(tensor, part) for part in box.iter_flat_range(stop, box.numel)]
            self._pending_boxes.extendleft(reversed(rest))
            room -= stop * self._itemsizes[tensor]
        return tuple(taken)
