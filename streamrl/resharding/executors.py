"""Executors of resharding plans over torch.distributed: point to point, or gathers within groups.

Every rank of the default process group creates the executor once per plan and runs it at every
switch between training and generation. Bytes travel unchanged, whatever their dtype, so the result
is bit-exact. The target has no version from the first moved byte until the last.

A plan is divided into rounds, so that the bytes in flight stay bounded: sets of transfers between
ranks that run at the same time. Each rank waits for its own transfers before it begins the next
round.
"""

import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, islice

import torch
import torch.distributed as dist

from streamrl.distributed.devices import get_local_device
from streamrl.errors import WeightsError
from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.plans import (
    BoxCopy,
    CopyPlan,
    GatherPlan,
    NamedBox,
    NodeTopology,
    plan_copies,
    plan_gather,
)
from streamrl.resharding.storage import ShardStorage, narrow_view

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


NO_VERSION = -1  # sent by ranks whose source storage has no version


@dataclass
class ReshardingStats:
    """Bytes of one rank, added up while an executor moves a version once.

    received_bytes, sent_bytes: from and to other ranks, counted per receiver. copied_bytes: within
    this rank's memory.
    """

    received_bytes: int = 0
    sent_bytes: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True)
class BoxPacker:
    """Packs boxes of tensors into a byte buffer and unpacks them.

    itemsizes: bytes per element, by tensor name.
    """

    itemsizes: Mapping[str, int]

    def sort_boxes(self, boxes: Sequence[NamedBox]) -> list[NamedBox]:
        """Order boxes for a buffer: wider elements first, so that every box is aligned."""
        return sorted(boxes, key=lambda named_box: -self.itemsizes[named_box[0]])

    def count_bytes(self, boxes: Sequence[NamedBox]) -> int:
        return sum(box.numel * self.itemsizes[tensor] for tensor, box in boxes)

    def create_packed(self, source: ShardStorage, boxes: Sequence[NamedBox]) -> torch.Tensor:
        """Return a new buffer that holds the boxes of `source`, one after another."""
        size = self.count_bytes(boxes)
        buffer = torch.empty(size, dtype=torch.uint8, device=source.device)
        self.pack_boxes(source, boxes, buffer)
        return buffer

    def pack_boxes(
        self, source: ShardStorage, boxes: Sequence[NamedBox], buffer: torch.Tensor
    ) -> None:
        """Copy boxes of `source` to the front of `buffer`, one after another; it may be longer."""
        begin = 0
        for tensor, box in boxes:
            view = source.get_view(tensor, box)
            end = begin + view.nbytes
            buffer[begin:end].view(view.dtype).view(box.shape).copy_(view)
            begin = end

    def unpack_boxes(
        self, buffer: torch.Tensor, boxes: Sequence[NamedBox], target: ShardStorage
    ) -> None:
        """Copy the boxes in `buffer` to `target`, except elements that `target` does not store."""
        begin = 0
        for tensor, box in boxes:
            end = begin + box.numel * self.itemsizes[tensor]
            for piece_box, view in target.get_pieces(tensor):
                if common := piece_box.intersect(box):
                    received = buffer[begin:end].view(view.dtype).view(box.shape)
                    narrow_view(view, piece_box, common).copy_(narrow_view(received, box, common))
            begin = end


class ReshardingExecutor(ABC):
    """Moves a version of the weights from the storage of one layout into that of another layout.

    buffer_bytes: staging memory of this rank, in addition to source and target.
    """

    buffer_bytes: int

    def __init__(self, plan: CopyPlan | GatherPlan, *, timeout_s: float) -> None:
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self._source_ranks = plan.source.ranks
        self._packer = BoxPacker(plan.target.model.itemsizes)

    def run(self, source: ShardStorage, target: ShardStorage) -> ReshardingStats:
        """Fill the storage `target` from `source`; every rank of the process group must call this.

        Raises WeightsError if ranks hold different versions or none, or a rank does not respond
        within timeout_s.
        """
        stats, version = ReshardingStats(), self._agree_on_version(source)
        target.version = None
        self._move_weights(source, target, stats)
        target.version = version
        return stats

    @abstractmethod
    def _move_weights(
        self, source: ShardStorage, target: ShardStorage, stats: ReshardingStats
    ) -> None:
        """Move all weights from `source` to `target`, and add the transfers to `stats`."""

    def _agree_on_version(self, source: ShardStorage) -> int:
        """Return the version that all source ranks hold. Raise WeightsError if they differ."""
        version = NO_VERSION if source.version is None else source.version
        own_version = torch.tensor([version], device=get_collective_device())
        all_versions = [torch.empty_like(own_version) for _ in range(dist.get_world_size())]
        ranks = range(dist.get_world_size())
        self._wait_for_work(
            dist.all_gather(all_versions, own_version, async_op=True), ranks, "their version"
        )
        versions = {
            rank: int(version.item())
            for rank, version in enumerate(all_versions)
            if rank in self._source_ranks
        }
        if len(set(versions.values())) != 1 or NO_VERSION in versions.values():
            listing = ", ".join(f"rank {rank}: {version}" for rank, version in versions.items())
            raise WeightsError(f"resharding: the ranks hold different versions ({listing})")
        return next(iter(versions.values()))

    def _wait_for_work(self, work: dist.Work, ranks: Sequence[int], payload: str) -> None:
        """Wait for a collective. Raise WeightsError, naming ranks and payload, if it fails."""
        start_s = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            others = [rank for rank in ranks if rank != self._rank]
            raise WeightsError(
                f"resharding: rank {self._rank} waited {time.monotonic() - start_s:.1f} of"
                f" {self._timeout_s:g} s for {payload} from ranks {others}: {error}"
            ) from error


class PointToPointExecutor(ReshardingExecutor):
    """Sends every box of a CopyPlan from the rank that holds the box to the rank that needs it.

    bucket_bytes: limit of the bytes that a rank sends, and that it receives, in a round of
    transfers.
    """

    def __init__(
        self, plan: CopyPlan, *, bucket_bytes: int = UNBOUNDED_BYTES, timeout_s: float = 60.0
    ) -> None:
        super().__init__(plan, timeout_s=timeout_s)
        self._local_boxes = [
            c.named_box for c in plan.copies if c.source == c.destination == self._rank
        ]
        self._rounds = []
        for copies in plan_copy_rounds(plan.copies, self._packer.itemsizes, bucket_bytes):
            sends = self._group_by_peer(
                (c.destination, c.named_box) for c in copies if c.source == self._rank
            )
            receives = self._group_by_peer(
                (c.source, c.named_box) for c in copies if c.destination == self._rank
            )
            if sends or receives:
                self._rounds.append((sends, receives))
        self.buffer_bytes = max(
            (
                sum(
                    self._packer.count_bytes(boxes)
                    for boxes in (*sends.values(), *receives.values())
                )
                for sends, receives in self._rounds
            ),
            default=0,
        )

    def _move_weights(
        self, source: ShardStorage, target: ShardStorage, stats: ReshardingStats
    ) -> None:
        for tensor, box in self._local_boxes:
            stats.copied_bytes += _copy_tensor(
                target.get_view(tensor, box), source.get_view(tensor, box)
            )
        for sends, receives in self._rounds:
            send_buffers = {
                peer: self._packer.create_packed(source, boxes) for peer, boxes in sends.items()
            }
            receive_buffers = {
                peer: torch.empty(
                    self._packer.count_bytes(boxes), dtype=torch.uint8, device=target.device
                )
                for peer, boxes in receives.items()
            }
            operations = [
                dist.P2POp(dist.isend, buffer, peer) for peer, buffer in send_buffers.items()
            ]
            operations += [
                dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in receive_buffers.items()
            ]
            for work in dist.batch_isend_irecv(operations):
                self._wait_for_work(work, sorted({*send_buffers, *receive_buffers}), "weights")
            for peer, buffer in receive_buffers.items():
                self._packer.unpack_boxes(buffer, receives[peer], target)
            stats.sent_bytes += sum(buffer.nbytes for buffer in send_buffers.values())
            stats.received_bytes += sum(buffer.nbytes for buffer in receive_buffers.values())

    def _group_by_peer(
        self, transfers: Iterable[tuple[int, NamedBox]]
    ) -> dict[int, list[NamedBox]]:
        """Group boxes by the rank at the other end, each group in the order of its buffer."""
        boxes_by_peer: dict[int, list[NamedBox]] = {}
        for peer, box in transfers:
            boxes_by_peer.setdefault(peer, []).append(box)
        return {peer: self._packer.sort_boxes(boxes) for peer, boxes in boxes_by_peer.items()}


class GroupGatherExecutor(ReshardingExecutor):
    """Exchanges weights within the groups of a GatherPlan; each rank keeps the data it needs.

    Uses all-gathers while every rank of a group has data left, then broadcasts from the remaining
    ranks, so no padding is sent.

    With micro-DP groups this is HybridFlow's zero-redundancy transition, with the ranks of a model
    replica HybridFlow-V's, and with a single group of all ranks DeepSpeed-Chat's full gather.
    Groups run concurrently. bucket_bytes: limit of the bytes that all ranks of a group together
    send in a round.
    """

    def __init__(
        self, plan: GatherPlan, *, bucket_bytes: int = UNBOUNDED_BYTES, timeout_s: float = 60.0
    ) -> None:
        super().__init__(plan, timeout_s=timeout_s)
        self._group_ranks: tuple[int, ...] = ()
        for group in plan.groups:
            process_group = dist.new_group(list(group), timeout=timedelta(seconds=timeout_s))
            if self._rank in group:
                self._group_ranks, self._group = group, process_group
        contributions = [plan.contributions[rank] for rank in self._group_ranks]
        self._rounds: list[GatherRound] = []
        if len(self._group_ranks) > 1:
            self._rounds = plan_gather_rounds(contributions, self._packer.itemsizes, bucket_bytes)
        self.buffer_bytes = max((round_.buffer_bytes for round_ in self._rounds), default=0)

    def _move_weights(
        self, source: ShardStorage, target: ShardStorage, stats: ReshardingStats
    ) -> None:
        for tensor, source_box, view in source:
            for target_box, target_view in target.get_pieces(tensor):
                if common := source_box.intersect(target_box):
                    stats.copied_bytes += _copy_tensor(
                        narrow_view(target_view, target_box, common),
                        narrow_view(view, source_box, common),
                    )
        if not self._rounds:
            return
        own_index = self._group_ranks.index(self._rank)
        # Allocate once: sizes differ by round, and torch's caching allocator would keep them all.
        device = _find_device(source, target)
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
        for round_ in self._rounds:
            spans = zip(round_.buffer_offsets, round_.contribution_bytes, strict=True)
            contributions = [buffer[start : start + size] for start, size in spans]
            if round_.is_even:
                gathered = buffer[: sum(round_.contribution_bytes)]
                own_contribution = buffer[
                    len(gathered) : len(gathered) + round_.contribution_bytes[own_index]
                ]
                self._packer.pack_boxes(source, round_.contributions[own_index], own_contribution)
                self._all_gather(gathered, own_contribution)
            else:
                self._packer.pack_boxes(
                    source, round_.contributions[own_index], contributions[own_index]
                )
                self._broadcast_buffers(contributions)
            for index, contribution in enumerate(contributions):
                if index != own_index:
                    self._packer.unpack_boxes(contribution, round_.contributions[index], target)
            own_bytes = round_.contribution_bytes[own_index]
            stats.received_bytes += sum(round_.contribution_bytes) - own_bytes
            stats.sent_bytes += own_bytes * (len(self._group_ranks) - 1)

    def _all_gather(self, gathered: torch.Tensor, contribution: torch.Tensor) -> None:
        work = dist.all_gather_single(gathered, contribution, group=self._group, async_op=True)
        self._wait_for_work(work, self._group_ranks, "weights")

    def _broadcast_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        works = [
            dist.broadcast(buffer, sender, group=self._group, async_op=True)
            for sender, buffer in zip(self._group_ranks, buffers, strict=True)
            if buffer.nbytes
        ]
        for work in works:
            self._wait_for_work(work, self._group_ranks, "weights")


def create_least_bytes_executor(
    source: ModelLayout,
    target: ModelLayout,
    *,
    cluster: NodeTopology,
    bucket_bytes: int,
    timeout_s: float,
) -> ReshardingExecutor:
    """Return the executor that reshards with the fewest bytes, on a tie a gather over all ranks.

    A gather is a single collective; copies are a message per pair of ranks. Every rank of the
    process group must call this, and all make the same choice.

    bucket_bytes: limit of a round of transfers: of the bytes that a rank sends and that it receives
    in copies, of the bytes that all ranks send in a gather.
    """
    copies = plan_copies(source, target, cluster)
    gather = plan_gather(source, target, [source.ranks])
    if is_gather_least_bytes(copies, gather):
        return GroupGatherExecutor(gather, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return PointToPointExecutor(copies, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


def is_gather_least_bytes(copies: CopyPlan, gather: GatherPlan) -> bool:
    """Return True if no rank receives more bytes under the gather than under the copies.

    `copies` must be the plan that moves the fewest bytes.
    """
    needed, sent = copies.count_received_bytes(), gather.count_sent_bytes()
    return all(
        needed[rank] == sum(sent[peer] for peer in group) - sent[rank]
        for group in gather.groups
        for rank in group
    )


def _find_device(*storages: ShardStorage) -> torch.device:
    """Return the device of the first non-empty storage, else that of the default process group."""
    devices = (storage.device for storage in storages for _ in islice(storage, 1))
    return next(devices, get_collective_device())


def get_collective_device() -> torch.device:
    """Return the device on which the default process group's collectives need their tensors.

    NCCL requires tensors on this process's GPU, even from a rank without weights.
    """
    is_nccl = dist.get_backend() == dist.Backend.NCCL
    return get_local_device() if is_nccl else torch.device("cpu")


def _copy_tensor(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy `source` to `target`; return the bytes copied, 0 if both are the same memory."""
    if target.data_ptr() == source.data_ptr() and target.stride() == source.stride():
        return 0
    target.copy_(source)
    return source.nbytes
