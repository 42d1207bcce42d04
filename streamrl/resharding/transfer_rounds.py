"""Division of a resharding plan into rounds, so that the bytes in flight stay bounded.

A round is a set of transfers between ranks that run at the same time; each rank waits for its own
transfers before it begins the next round.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.plans import BoxCopy, NamedBox

#: Bucket size with which all transfers of a plan form a single round.
UNBOUNDED_BYTES = 1 << 62


def split_box(box: TensorBox, max_numel: int) -> Iterator[TensorBox]:
    """Yield disjoint boxes of at most `max_numel` elements that cover `box`, in row-major order."""
    if box.numel <= max_numel:
        yield box
        return
    dim = next(i for i, size in enumerate(box.shape) if size > 1)
    row_numel = box.numel // box.shape[dim]
    step = max(1, max_numel // row_numel)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        yield from split_box(box.narrow(dim, start, stop), max_numel)


def plan_copy_rounds(
    copies: Iterable[BoxCopy], itemsizes: Mapping[str, int], bucket_bytes: int
) -> list[list[BoxCopy]]:
    """Divide copies between ranks into rounds of transfers, so that few bytes are in flight.

    bucket_bytes: limit of the bytes that a rank sends, and that it receives, in a round; at least
    the largest itemsize. itemsizes: bytes per element, by tensor name. First fit: each copy goes to
    the first round with space at both its ends. Larger copies are split; copies within a rank are
    left out.
    """
    rounds: list[list[BoxCopy]] = []
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    # First round with space for a rank, by direction; earlier rounds need no search.
    first_open_round: dict[tuple[str, int], int] = defaultdict(int)
    for copy in copies:
        if copy.source == copy.destination:
            continue
        tensor, copy_box = copy.named_box
        itemsize = itemsizes[tensor]
        for box in split_box(copy_box, max(1, bucket_bytes // itemsize)):
            num_bytes = box.numel * itemsize
            index = max(
                first_open_round["from", copy.source], first_open_round["to", copy.destination]
            )
            while (
                max(sent[index, copy.source], received[index, copy.destination]) + num_bytes
                > bucket_bytes
            ):
                index += 1
            sent[index, copy.source] += num_bytes
            received[index, copy.destination] += num_bytes
            for side, rank, used_bytes in (
                ("from", copy.source, sent),
                ("to", copy.destination, received),
            ):
                while used_bytes[first_open_round[side, rank], rank] >= bucket_bytes:
                    first_open_round[side, rank] += 1
            while len(rounds) <= index:
                rounds.append([])
            rounds[index].append(
                copy if box is copy_box else replace(copy, named_box=(tensor, box))
            )
    return rounds


@dataclass(frozen=True)
class GatherRound:
    """Round of transfers in a group of ranks: the boxes that each rank sends to all others.

    contribution_bytes, buffer_offsets: size of each rank's boxes and their place in the receiver's
    buffer. If all sizes are equal (`is_even`) the round is an all-gather, otherwise a broadcast
    from each rank that sends.
    """

    contributions: tuple[tuple[NamedBox, ...], ...]
    contribution_bytes: tuple[int, ...]
    buffer_offsets: tuple[int, ...]
    is_even: bool

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a rank's buffer: for the result, and in an all-gather for its own boxes too."""
        return self.buffer_offsets[-1] + self.contribution_bytes[-1] * (1 + self.is_even)


def plan_gather_rounds(
    contributions: Sequence[Sequence[NamedBox]], itemsizes: Mapping[str, int], bucket_bytes: int
) -> list[GatherRound]:
    """Divide the exchange of boxes within a group of ranks into rounds of transfers.

    contributions: boxes that each rank sends, in the order of the group. itemsizes: bytes per
    element, by tensor name. bucket_bytes: limit of a round's bytes, at least the widest element per
    rank. Rounds are even while every rank has bytes left; there is no padding. Example for 2 ranks
    with 10 and 6 bytes in buckets of 8: rounds (4, 4), (2, 2) are all-gathers, (4, 0) is a
    broadcast.
    """
    widest = max(itemsizes.values())
    streams = [_BoxStream(boxes, itemsizes) for boxes in contributions]
    even_bytes = min(stream.remaining_bytes for stream in streams) // widest * widest
    rounds = []
    while num_senders := sum(stream.remaining_bytes > 0 for stream in streams):
        num_shares = len(streams) if even_bytes else num_senders
        share = bucket_bytes // num_shares // widest * widest
        size = min(share, even_bytes) if even_bytes else share
        before = [stream.remaining_bytes for stream in streams]
        boxes_by_rank = tuple(stream.take_bytes(size) for stream in streams)
        sizes = tuple(
            num_bytes - stream.remaining_bytes
            for num_bytes, stream in zip(before, streams, strict=True)
        )
        # Align every contribution to the widest element, so that torch can view it in place.
        starts = accumulate((-(-size // widest) * widest for size in sizes[:-1]), initial=0)
        rounds.append(GatherRound(boxes_by_rank, sizes, tuple(starts), is_even=even_bytes > 0))
        even_bytes -= size if even_bytes else 0
    return rounds


class _BoxStream:
    """Queue of boxes from which a given number of bytes can be taken.

    Wider elements come first and all itemsizes are powers of two, so a multiple of the widest
    itemsize never ends within an element.
    """

    def __init__(self, boxes: Sequence[NamedBox], itemsizes: Mapping[str, int]) -> None:
        self._pending_boxes = deque(sorted(boxes, key=lambda named_box: -itemsizes[named_box[0]]))
        self._itemsizes = itemsizes
        self.remaining_bytes = sum(box.numel * itemsizes[tensor] for tensor, box in boxes)

    def take_bytes(self, num_bytes: int) -> tuple[NamedBox, ...]:
        """Remove and return the next boxes of `num_bytes` in total; split the last if necessary."""
        boxes: list[NamedBox] = []
        num_left = min(num_bytes, self.remaining_bytes)
        self.remaining_bytes -= num_left
        while num_left:
            tensor, box = self._pending_boxes.popleft()
            stop = min(box.numel, num_left // self._itemsizes[tensor])
            boxes.extend((tensor, piece) for piece in box.iter_flat_range(0, stop))
            rest_boxes = [(tensor, piece) for piece in box.iter_flat_range(stop, box.numel)]
            self._pending_boxes.extendleft(reversed(rest_boxes))
            num_left -= stop * self._itemsizes[tensor]
        return tuple(boxes)
