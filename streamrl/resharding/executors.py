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
from streamrl.resharding.buckets import UNBOUNDED, GatherRound, copy_rounds, gather_rounds
from streamrl.resharding.byte_report import Nodes
from streamrl.resharding.layouts import Layout
from streamrl.resharding.packed_boxes import Packer
from streamrl.resharding.plans import CopyPlan, GatherPlan, Gift, plan_copies, plan_gather
from streamrl.resharding.storage import Storage, memory_bytes, part

NO_VERSION = -1
"""What a rank says that holds none of the source."""


@dataclass(frozen=True)
class Moved:
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
class _Counts:
    received: int = 0
    sent: int = 0
    copied: int = 0
    staging: int = 0
    rounds: int = 0

    def round(self, *, received: int, sent: int, staging: int) -> None:
        self.received += received
        self.sent += sent
        self.staging = max(self.staging, staging)
        self.rounds += 1


class Executor(ABC):
    """Moves a version of the weights from one layout's storage into another's.

    buffer_bytes: what is under way at once on this rank, beside the memory of both.
    """

    buffer_bytes: int

    def __init__(self, plan: CopyPlan | GatherPlan, *, timeout_s: float) -> None:
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self._givers = plan.source.ranks
        self._packer = Packer({spec.name: spec.itemsize for spec in plan.target.model.tensors})

    def run(self, source: Storage, target: Storage) -> Moved:
        """Fill `target` with what `source` holds; every rank of the process group calls it.

        Raises WeightsError if ranks hold different versions or none, or one does not answer within
        timeout_s.
        """
        begun = time.perf_counter()
        version = self._agree(source)
        target.version = None
        counts = _Counts()
        self._move(source, target, counts)
        target.version = version
        return Moved(
            version=version,
            received_bytes=counts.received,
            sent_bytes=counts.sent,
            copied_bytes=counts.copied,
            peak_bytes=memory_bytes(source, target) + counts.staging,
            rounds=counts.rounds,
            seconds=time.perf_counter() - begun,
        )

    @abstractmethod
    def _move(self, source: Storage, target: Storage, counts: _Counts) -> None:
        """Move all of it, and count."""

    def _agree(self, source: Storage) -> int:
        version = NO_VERSION if source.version is None else source.version
        mine = torch.tensor([version], device=meeting_device())
        said = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        everyone = range(dist.get_world_size())
        self._wait(dist.all_gather(said, mine, async_op=True), everyone, "their version")
        versions = {
            rank: int(version.item()) for rank, version in enumerate(said) if rank in self._givers
        }
        if len(set(versions.values())) != 1 or NO_VERSION in versions.values():
            held = ", ".join(f"rank {rank}: {held}" for rank, held in versions.items())
            raise WeightsError(f"resharding: the ranks do not hold one version ({held})")
        return next(iter(versions.values()))

    def _wait(self, work: dist.Work, ranks: Sequence[int], what: str) -> None:
        begun = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            others = [rank for rank in ranks if rank != self._rank]
            raise WeightsError(
                f"resharding: rank {self._rank} waited {time.monotonic() - begun:.1f} of"
                f" {self._timeout_s:g} s for {what} from ranks {others}: {error}"
            ) from error


class PointToPoint(Executor):
    """Sends every box of a CopyPlan from the rank that has it to the one that needs it.

    bucket_bytes: what a rank sends, and what it receives, in one round, at most.
    """

    def __init__(
        self, plan: CopyPlan, *, bucket_bytes: int = UNBOUNDED, timeout_s: float = 60.0
    ) -> None:
        super().__init__(plan, timeout_s=timeout_s)
        self._stays = [c.gift for c in plan.copies if c.source == c.destination == self._rank]
        self._rounds = []
        limit = bucket_holding(bucket_bytes, self._packer.itemsizes)
        for copies in copy_rounds(plan.copies, self._packer.itemsizes, limit):
            sends = self._by_peer((c.destination, c.gift) for c in copies if c.source == self._rank)
            receives = self._by_peer(
                (c.source, c.gift) for c in copies if c.destination == self._rank
            )
            if sends or receives:
                self._rounds.append((sends, receives))
        self.buffer_bytes = max(
            (
                sum(self._packer.num_bytes(gifts) for gifts in (*out.values(), *into.values()))
                for out, into in self._rounds
            ),
            default=0,
        )

    def _move(self, source: Storage, target: Storage, counts: _Counts) -> None:
        for tensor, box in self._stays:
            counts.copied += _fill(target.view(tensor, box), source.view(tensor, box))
        for sends, receives in self._rounds:
            out = {peer: self._packer.packed(source, gifts) for peer, gifts in sends.items()}
            into = {
                peer: torch.empty(
                    self._packer.num_bytes(gifts), dtype=torch.uint8, device=target.device
                )
                for peer, gifts in receives.items()
            }
            operations = [dist.P2POp(dist.isend, parcel, peer) for peer, parcel in out.items()]
            operations += [dist.P2POp(dist.irecv, parcel, peer) for peer, parcel in into.items()]
            for work in dist.batch_isend_irecv(operations):
                self._wait(work, sorted({*out, *into}), "weights")
            for peer, parcel in into.items():
                self._packer.unpack(parcel, receives[peer], target)
            sent = sum(parcel.nbytes for parcel in out.values())
            received = sum(parcel.nbytes for parcel in into.values())
            counts.round(received=received, sent=sent, staging=sent + received)

    def _by_peer(self, gifts: Iterable[tuple[int, Gift]]) -> dict[int, list[Gift]]:
        found: dict[int, list[Gift]] = {}
        for peer, gift in gifts:
            found.setdefault(peer, []).append(gift)
        return {peer: self._packer.in_order(for_peer) for peer, for_peer in found.items()}


class GatherInGroups(Executor):
    """Gathers within the groups of a GatherPlan; each rank keeps what it needs.

    All-gathers as long as all ranks of a group have something left to give, and then broadcasts
    from those that have: no byte is moved for padding.

    With micro-DP groups this is HybridFlow's zero-redundancy transition, with the ranks of a model
    replica HybridFlow-V's, and with one group of all ranks DeepSpeed-Chat's full gather. Groups go
    side by side. bucket_bytes: what the ranks of a group give in one round, together.
    """

    def __init__(
        self, plan: GatherPlan, *, bucket_bytes: int = UNBOUNDED, timeout_s: float = 60.0
    ) -> None:
        super().__init__(plan, timeout_s=timeout_s)
        most = max(map(len, plan.groups), default=1)
        limit = bucket_holding(bucket_bytes, self._packer.itemsizes, ranks=most)
        self._members: tuple[int, ...] = ()
        for group in plan.groups:
            made = dist.new_group(list(group), timeout=timedelta(seconds=timeout_s))
            if self._rank in group:
                self._members, self._group = group, made
        gives = [plan.gives[rank] for rank in self._members]
        self._rounds: list[GatherRound] = []
        if len(self._members) > 1:
            self._rounds = gather_rounds(gives, self._packer.itemsizes, limit)
        self.buffer_bytes = max((step.buffer_bytes for step in self._rounds), default=0)

    def _move(self, source: Storage, target: Storage, counts: _Counts) -> None:
        for tensor, held, view in source:
            for wanted, place in target.pieces(tensor):
                if common := held.meet(wanted):
                    counts.copied += _fill(part(place, wanted, common), part(view, held, common))
        if not self._rounds:
            return
        mine = self._members.index(self._rank)
        # The same memory in every round: an allocator that is asked anew keeps ever more.
        device = _device_of(source, target)
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
        for step in self._rounds:
            spans = zip(step.starts, step.sizes, strict=True)
            parcels = [buffer[start : start + size] for start, size in spans]
            if step.is_even:
                whole = buffer[: sum(step.sizes)]
                own = buffer[len(whole) : len(whole) + step.sizes[mine]]
                self._packer.pack(source, step.gives[mine], own)
                self._all_gather(whole, own)
            else:
                self._packer.pack(source, step.gives[mine], parcels[mine])
                self._broadcast(parcels)
            for index, parcel in enumerate(parcels):
                if index != mine:
                    self._packer.unpack(parcel, step.gives[index], target)
            others = sum(step.sizes) - step.sizes[mine]
            sent = step.sizes[mine] * (len(self._members) - 1)
            counts.round(received=others, sent=sent, staging=buffer.nbytes)

    def _all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        work = dist.all_gather_single(whole, own, group=self._group, async_op=True)
        self._wait(work, self._members, "weights")

    def _broadcast(self, parcels: Sequence[torch.Tensor]) -> None:
        works = [
            dist.broadcast(parcel, giver, group=self._group, async_op=True)
            for giver, parcel in zip(self._members, parcels, strict=True)
            if parcel.nbytes
        ]
        for work in works:
            self._wait(work, self._members, "weights")


def least_moving(
    source: Layout, target: Layout, *, cluster: Nodes, bucket_bytes: int, timeout_s: float
) -> Executor:
    """One that moves the fewest bytes: a gather of all ranks where that moves no more than copies.

    A gather is one collective; copies are a message from each rank to each. Every rank of the
    process group calls it, and all come to the same.
    """
    copies = plan_copies(source, target, cluster)
    gather = plan_gather(source, target, cluster, [source.ranks])
    if gather_is_least(copies, gather):
        return GatherInGroups(gather, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return PointToPoint(copies, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


def gather_is_least(copies: CopyPlan, gather: GatherPlan) -> bool:
    """Whether a gather moves no byte more than the copies do."""
    least, whole = copies.bytes_report(), gather.bytes_report()
    return all(
        least.ranks[rank].received_bytes == counts.received_bytes
        for rank, counts in whole.ranks.items()
    )


def _device_of(*storages: Storage) -> torch.device:
    """Where the first of them is that holds anything; else where the ranks meet."""
    held = (storage.device for storage in storages for _ in islice(storage, 1))
    return next(held, meeting_device())


def meeting_device() -> torch.device:
    """Where a tensor must be that the ranks of the default group exchange: nccl takes those of
    this process's GPU only, whether or not it holds any weights."""
    if dist.get_backend() == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def bucket_holding(bucket_bytes: int, itemsizes: Mapping[str, int], *, ranks: int = 1) -> int:
    """The bucket, if an element of each of so many ranks fits into it. Raises ValueError."""
    least = ranks * max(itemsizes.values())
    if bucket_bytes < least:
        raise ValueError(f"buckets of {bucket_bytes} bytes: must be at least {least}")
    return bucket_bytes


def _fill(place: torch.Tensor, given: torch.Tensor) -> int:
    """Copy and say how many bytes; nothing if both are the same memory."""
    if place.data_ptr() == given.data_ptr() and place.stride() == given.stride():
        return 0
    place.copy_(given)
    return given.nbytes
