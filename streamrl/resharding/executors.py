"""Carrying out a plan over torch.distributed: point to point, or by gathers within groups.

An executor is made once for a plan, by every rank of the default process group, and run at every
switch. Bytes travel as they are, whatever their dtype, so the result is bit-exact. A target holds
no version from the first byte that is moved until the last one is there.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist

from streamrl.errors import WeightsError
from streamrl.resharding.buckets import (
    UNBOUNDED_BYTES,
    GatherRound,
    plan_copy_rounds,
    plan_gather_rounds,
)
from streamrl.resharding.byte_report import NodeTopology
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.packed_boxes import BoxPacker
from streamrl.resharding.plans import CopyPlan, GatherPlan, NamedBox, plan_copies, plan_gather
from streamrl.resharding.storage import ShardStorage, count_memory_bytes, narrow_view

NO_VERSION = -1
"""What a rank says that holds none of the source."""


@dataclass(frozen=True)
class ReshardingStats:
    """What one rank moved in one run, measured.

    received_bytes, sent_bytes: from and to other ranks, each byte once for each rank it reaches.
    copied_bytes: within this rank's memory. peak_bytes: the buffers of
    source and target and what was under way. rounds: how often it waited for others.
    """

    version: int
    received_bytes: int
    sent_bytes: int
    copied_bytes: int
    peak_bytes: int
    rounds: int
    seconds: float


@dataclass
class _TransferCounts:
    received_bytes: int = 0
    sent_bytes: int = 0
    copied_bytes: int = 0
    peak_staging_bytes: int = 0
    num_rounds: int = 0

    def add_round(self, *, received: int, sent: int, staging: int) -> None:
        self.received_bytes += received
        self.sent_bytes += sent
        self.peak_staging_bytes = max(self.peak_staging_bytes, staging)
        self.num_rounds += 1


class ReshardingExecutor(ABC):
    """Moves a version of the weights from one layout's storage into another's.

    buffer_bytes: what is under way at once on this rank, beside the memory of both.
    """

    buffer_bytes: int

    def __init__(self, plan: CopyPlan | GatherPlan, *, timeout_s: float) -> None:
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self._source_ranks = plan.source.ranks
        self._packer = BoxPacker({spec.name: spec.itemsize for spec in plan.target.model.tensors})

    def run(self, source: ShardStorage, target: ShardStorage) -> ReshardingStats:
        """Fill `target` with what `source` holds; every rank of the process group calls it.

        Raises WeightsError if ranks hold different versions or none, or one does not answer within
        timeout_s.
        """
        begun = time.perf_counter()
        version = self._agree_on_version(source)
        target.version = None
        counts = _TransferCounts()
        self._move_weights(source, target, counts)
        target.version = version
        return ReshardingStats(
            version=version,
            received_bytes=counts.received_bytes,
            sent_bytes=counts.sent_bytes,
            copied_bytes=counts.copied_bytes,
            peak_bytes=count_memory_bytes(source, target) + counts.peak_staging_bytes,
            rounds=counts.num_rounds,
            seconds=time.perf_counter() - begun,
        )

    @abstractmethod
    def _move_weights(
        self, source: ShardStorage, target: ShardStorage, counts: _TransferCounts
    ) -> None:
        """Move all of it, and count."""

    def _agree_on_version(self, source: ShardStorage) -> int:
        version = NO_VERSION if source.version is None else source.version
        mine = torch.tensor([version], device=get_collective_device())
        said = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        everyone = range(dist.get_world_size())
        self._wait_for_work(dist.all_gather(said, mine, async_op=True), everyone, "their version")
        versions = {
            rank: int(version.item())
            for rank, version in enumerate(said)
            if rank in self._source_ranks
        }
        if len(set(versions.values())) != 1 or NO_VERSION in versions.values():
            held = ", ".join(f"rank {rank}: {held}" for rank, held in versions.items())
            raise WeightsError(f"resharding: the ranks do not hold one version ({held})")
        return next(iter(versions.values()))

    def _wait_for_work(self, work: dist.Work, ranks: Sequence[int], what: str) -> None:
        begun = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            others = [rank for rank in ranks if rank != self._rank]
            raise WeightsError(
                f"resharding: rank {self._rank} waited {time.monotonic() - begun:.1f} of"
                f" {self._timeout_s:g} s for {what} from ranks {others}: {error}"
            ) from error


class PointToPointExecutor(ReshardingExecutor):
    """Sends every box of a CopyPlan from the rank that has it to the one that needs it.

    bucket_bytes: what a rank sends, and what it receives, in one round, at most.
    """

    def __init__(
        self, plan: CopyPlan, *, bucket_bytes: int = UNBOUNDED_BYTES, timeout_s: float = 60.0
    ) -> None:
        super().__init__(plan, timeout_s=timeout_s)
        self._local_boxes = [
            c.named_box for c in plan.copies if c.source == c.destination == self._rank
        ]
        self._rounds = []
        limit = validate_bucket_bytes(bucket_bytes, self._packer.itemsizes)
        for copies in plan_copy_rounds(plan.copies, self._packer.itemsizes, limit):
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
                sum(self._packer.count_bytes(gifts) for gifts in (*out.values(), *into.values()))
                for out, into in self._rounds
            ),
            default=0,
        )

    def _move_weights(
        self, source: ShardStorage, target: ShardStorage, counts: _TransferCounts
    ) -> None:
        for tensor, box in self._local_boxes:
            counts.copied_bytes += _copy_tensor(
                target.get_view(tensor, box), source.get_view(tensor, box)
            )
        for sends, receives in self._rounds:
            out = {peer: self._packer.create_packed(source, gifts) for peer, gifts in sends.items()}
            into = {
                peer: torch.empty(
                    self._packer.count_bytes(gifts), dtype=torch.uint8, device=target.device
                )
                for peer, gifts in receives.items()
            }
            operations = [dist.P2POp(dist.isend, parcel, peer) for peer, parcel in out.items()]
            operations += [dist.P2POp(dist.irecv, parcel, peer) for peer, parcel in into.items()]
            for work in dist.batch_isend_irecv(operations):
                self._wait_for_work(work, sorted({*out, *into}), "weights")
            for peer, parcel in into.items():
                self._packer.unpack_boxes(parcel, receives[peer], target)
            sent = sum(parcel.nbytes for parcel in out.values())
            received = sum(parcel.nbytes for parcel in into.values())
            counts.add_round(received=received, sent=sent, staging=sent + received)

    def _group_by_peer(self, gifts: Iterable[tuple[int, NamedBox]]) -> dict[int, list[NamedBox]]:
        found: dict[int, list[NamedBox]] = {}
        for peer, gift in gifts:
            found.setdefault(peer, []).append(gift)
        return {peer: self._packer.sort_boxes(for_peer) for peer, for_peer in found.items()}


class GroupGatherExecutor(ReshardingExecutor):
    """Gathers within the groups of a GatherPlan; each rank keeps what it needs.

    All-gathers as long as all ranks of a group have something left to give, and then broadcasts
    from those that have: no byte is moved for padding.

    With micro-DP groups this is HybridFlow's zero-redundancy transition, with the ranks of a model
    replica HybridFlow-V's, and with one group of all ranks DeepSpeed-Chat's full gather. Groups go
    side by side. bucket_bytes: what the ranks of a group give in one round, together.
    """

    def __init__(
        self, plan: GatherPlan, *, bucket_bytes: int = UNBOUNDED_BYTES, timeout_s: float = 60.0
    ) -> None:
        super().__init__(plan, timeout_s=timeout_s)
        most = max(map(len, plan.groups), default=1)
        limit = validate_bucket_bytes(bucket_bytes, self._packer.itemsizes, ranks=most)
        self._group_ranks: tuple[int, ...] = ()
        for group in plan.groups:
            made = dist.new_group(list(group), timeout=timedelta(seconds=timeout_s))
            if self._rank in group:
                self._group_ranks, self._group = group, made
        gives = [plan.contributions[rank] for rank in self._group_ranks]
        self._rounds: list[GatherRound] = []
        if len(self._group_ranks) > 1:
            self._rounds = plan_gather_rounds(gives, self._packer.itemsizes, limit)
        self.buffer_bytes = max((step.buffer_bytes for step in self._rounds), default=0)

    def _move_weights(
        self, source: ShardStorage, target: ShardStorage, counts: _TransferCounts
    ) -> None:
        for tensor, held, view in source:
            for wanted, place in target.get_pieces(tensor):
                if common := held.intersect(wanted):
                    counts.copied_bytes += _copy_tensor(
                        narrow_view(place, wanted, common), narrow_view(view, held, common)
                    )
        if not self._rounds:
            return
        mine = self._group_ranks.index(self._rank)
        # The same memory in every round: an allocator that is asked anew keeps ever more.
        device = _find_device(source, target)
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
        for step in self._rounds:
            spans = zip(step.buffer_offsets, step.contribution_bytes, strict=True)
            parcels = [buffer[start : start + size] for start, size in spans]
            if step.is_even:
                whole = buffer[: sum(step.contribution_bytes)]
                own = buffer[len(whole) : len(whole) + step.contribution_bytes[mine]]
                self._packer.pack_boxes(source, step.contributions[mine], own)
                self._all_gather(whole, own)
            else:
                self._packer.pack_boxes(source, step.contributions[mine], parcels[mine])
                self._broadcast_buffers(parcels)
            for index, parcel in enumerate(parcels):
                if index != mine:
                    self._packer.unpack_boxes(parcel, step.contributions[index], target)
            others = sum(step.contribution_bytes) - step.contribution_bytes[mine]
            sent = step.contribution_bytes[mine] * (len(self._group_ranks) - 1)
            counts.add_round(received=others, sent=sent, staging=buffer.nbytes)

    def _all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        work = dist.all_gather_single(whole, own, group=self._group, async_op=True)
        self._wait_for_work(work, self._group_ranks, "weights")

    def _broadcast_buffers(self, parcels: Sequence[torch.Tensor]) -> None:
        works = [
            dist.broadcast(parcel, giver, group=self._group, async_op=True)
            for giver, parcel in zip(self._group_ranks, parcels, strict=True)
            if parcel.nbytes
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
    """One that moves the fewest bytes: a gather of all ranks where that moves no more than copies.

    A gather is one collective; copies are a message from each rank to each. Every rank of the
    process group calls it, and all come to the same.
    """
    copies = plan_copies(source, target, cluster)
    gather = plan_gather(source, target, cluster, [source.ranks])
    if is_gather_least_bytes(copies, gather):
        return GroupGatherExecutor(gather, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return PointToPointExecutor(copies, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


def is_gather_least_bytes(copies: CopyPlan, gather: GatherPlan) -> bool:
    """Whether a gather moves no byte more than the copies do."""
    least, whole = copies.report_bytes(), gather.report_bytes()
    return all(
        least.rank_bytes[rank].received_bytes == counts.received_bytes
        for rank, counts in whole.rank_bytes.items()
    )


def _find_device(*storages: ShardStorage) -> torch.device:
    """Where the first of them is that holds anything; else where the ranks meet."""
    held = (storage.device for storage in storages for _ in islice(storage, 1))
    return next(held, get_collective_device())


def get_collective_device() -> torch.device:
    """Where a tensor must be that the ranks of the default group exchange: nccl takes those of
    this process's GPU only, whether or not it holds any weights."""
    if dist.get_backend() == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def validate_bucket_bytes(
    bucket_bytes: int, itemsizes: Mapping[str, int], *, ranks: int = 1
) -> int:
    """The bucket, if an element of each of so many ranks fits into it. Raises ValueError."""
    least = ranks * max(itemsizes.values())
    if bucket_bytes < least:
        raise ValueError(f"buckets of {bucket_bytes} bytes: must be at least {least}")
    return bucket_bytes


def _copy_tensor(place: torch.Tensor, given: torch.Tensor) -> int:
    """Copy and say how many bytes; nothing if both are the same memory."""
    if place.data_ptr() == given.data_ptr() and place.stride() == given.stride():
        return 0
    place.copy_(given)
    return given.nbytes
