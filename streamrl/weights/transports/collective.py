"""Collective transport: the publisher broadcasts a version once to all members of a group.

The writer copies buckets into staging buffers and a background thread sends them while training
continues. Buffers are in pinned host memory. A version also goes through a fallback transport if
readers may need it: readers that are not members, arrive late, or took part in a failed broadcast.
The publisher decides before each version whether all members are ready.

If the last version reached the same readers, the copy for the fallback is left out. A reader that
needs it then fails, and the version is published again, with a copy.

The ranks of split generators get their slices, once these have told what each rank reads: a group
for each rank connects the publisher with that rank's GPU of every generator. The slices are packed
like the tensors of a model of its own, and so have buckets and checksums of their own.

Group epochs of the collective transport: fixed members, their process group, and agreement.

A process group works only while every member takes part in every collective. Before each version
all members therefore announce themselves in a TCPStore that the publisher serves, and the publisher
decides whether to send. An absent member costs the others a wait, never a broken group. A failed
broadcast ends the epoch; the next epoch creates a new group.

Groups are created directly, not through torch.distributed's default group, because the process may
already have one (vLLM's workers do).
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as SendTimeoutError
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.distributed.devices import (
    GPU,
    NCCL_ENV,
    get_local_device,
    get_rank_device,
    make_gpu_stream,
    override_environment,
    use_gpu_stream,
)
from streamrl.distributed.process_group import serve_tcp_store
from streamrl.errors import VersionNotStoredError, WeightsError
from streamrl.messages import Array
from streamrl.weights.buckets import compute_tensor_checksum, publish_version, view_tensors
from streamrl.weights.parameters import as_tensor
from streamrl.weights.pinned_memory import allocate_pinned
from streamrl.weights.rank_slices import Readers, SliceLayout, iter_slices, make_slice_name
from streamrl.weights.transport import (
    Transport,
    TransportReader,
    TransportSpec,
    TransportWriter,
    estimate_send_s,
)
from streamrl.weights.transports import object_store
from streamrl.weights.versions import NUM_INITIAL_CHECKS, WeightBucket, WeightManifest

PUBLISHER_RANK = 0
STORE_POLL_S = 0.002
COLLECTIVE_POLL_S = 0.0005
NCCL_TIMEOUT = timedelta(days=1)
"""Timeout of NCCL groups, whose operations `BroadcastGroup` aborts much earlier."""
NCCL_WATCHDOG_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Environment while a group is made: its watchdog then logs a lost peer; by default it would end
the process."""


GROUP_LOCK = threading.Lock()
"""Held while the environment is changed: groups of several ranks are made at once."""


@dataclass(frozen=True)
class GroupEpoch:
    """Period in which the members of the broadcast group do not change.

    host, port: address of the publisher's TCPStore. members: names of the readers, by rank from 1.
    num_groups: groups with which this one shares the publisher's network, itself included.
    """

    number: int
    host: str
    port: int
    members: tuple[str, ...]
    num_groups: int = 1

    def estimate_send_s(self, num_bytes: int) -> float:
        """Return the seconds that bytes take if all groups send as many at once."""
        return estimate_send_s(num_bytes * self.num_groups)

    def go_ahead_key(self, version: int) -> str:
        """Return the TCPStore key of the publisher's decision whether to send `version`."""
        return f"{self.number}/{version}/verdict"

    def list_keys(self, version: int) -> list[str]:
        """Return all TCPStore keys that belong to `version`."""
        return [
            self.go_ahead_key(version),
            *(self.make_ready_key(version, m) for m in self.members),
        ]

    def make_ready_key(self, version: int, member: str) -> str:
        """Return the TCPStore key by which `member` announces that it is ready for `version`."""
        return f"{self.number}/{version}/here/{member}"


class SharedDeadline:
    """Deadline shared by several waits, `timeout_s` seconds after its creation.

    As part of the deadline `whole` it passes no later than that one.
    """

    def __init__(self, timeout_s: float, whole: "SharedDeadline | None" = None) -> None:
        self._end_s = time.monotonic() + timeout_s
        self._whole = whole

    def expire(self) -> None:
        """Let the deadline and its parts pass now. May be called from another thread."""
        self._end_s = time.monotonic()

    def has_passed(self) -> bool:
        return self._compute_remaining_s() <= 0

    def compute_remaining_time(self) -> timedelta:
        """Return the time left, at least 10 ms: torch.distributed takes zero for no timeout."""
        return timedelta(seconds=max(self._compute_remaining_s(), 0.01))

    def _compute_remaining_s(self) -> float:
        remaining_s = self._end_s - time.monotonic()
        if self._whole is None:
            return remaining_s
        return min(remaining_s, self._whole._compute_remaining_s())


class BroadcastGroup:
    """Process group of the publisher (rank 0) and the members of an epoch.

    The constructor waits for all members. Every method raises RuntimeError on timeout or a lost
    peer, and the group is unusable afterwards. `device` selects NCCL (cuda) or Gloo.

    Deadlines are kept here, by polling and `abort`: NCCL notices a dead peer late or never, a wait
    for NCCL only orders GPU streams, and its own timeout ends the process.
    """

    def __init__(
        self,
        store: dist.Store,
        epoch: GroupEpoch,
        rank: int,
        device: torch.device,
        deadline: SharedDeadline,
    ) -> None:
        prefix_store = dist.PrefixStore(f"{epoch.number}/group", store)
        size = len(epoch.members) + 1
        self._device, self._epoch = device, epoch
        self._is_publisher = rank == PUBLISHER_RANK
        # Neither training nor sampling delays a broadcast.
        self._stream = make_gpu_stream(device) if device.type == GPU else None
        make_group = make_nccl_group if device.type == GPU else make_gloo_group
        self._group = make_group(prefix_store, rank, size, deadline)

    def broadcast_buckets(
        self, buckets: Iterable[Array], timeout_s: float, whole: SharedDeadline
    ) -> None:
        """Broadcast buckets in turn, each in `timeout_s` and its transfer time, all until `whole`.

        So a lost member costs the others no more, however large the version is.
        """
        for data in buckets:
            deadline = SharedDeadline(timeout_s + self._epoch.estimate_send_s(data.nbytes), whole)
            self.broadcast_tensor(as_tensor(data), deadline)

    def broadcast_tensor(self, tensor: Tensor, deadline: SharedDeadline) -> None:
        """Broadcast the publisher's `tensor` into the members' `tensor` of the same shape.

        Tensors in host memory travel through a copy on the group's device.
        """
        with use_gpu_stream(self._stream):
            device_tensor = tensor
            if tensor.device.type != self._device.type:
                device_tensor = torch.empty_like(tensor, device=self._device)
                if self._is_publisher:
                    device_tensor.copy_(tensor)
            try:
                self._broadcast_on_device(device_tensor, deadline)
            except (RuntimeError, WeightsError):
                # Now, as the watchdog of NCCL reports a lost peer to the process's other groups.
                self._abort()
                raise
            if not self._is_publisher and device_tensor is not tensor:
                tensor.copy_(device_tensor)

    def _broadcast_on_device(self, tensor: Tensor, deadline: SharedDeadline) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = PUBLISHER_RANK
        options.timeout = deadline.compute_remaining_time()  # ends the threads of Gloo
        work = self._group.broadcast([tensor], options)
        while not work.is_completed():
            if deadline.has_passed():
                raise WeightsError("timed out during a broadcast")
            time.sleep(COLLECTIVE_POLL_S)
        try:
            # Without a timeout of its own, a wait for NCCL hides the error of a lost peer.
            work.wait(deadline.compute_remaining_time())
        except RuntimeError as error:
            if deadline.has_passed():  # Gloo's thread may be the first to notice
                raise WeightsError("timed out during a broadcast") from error
            raise

    def _abort(self) -> None:
        """Abort the running broadcast and drop the process group."""
        self._group.abort()
        last_reference, self._group = [self._group], None
        # Gloo aborts nothing: its destructor waits, without the GIL, for the broadcast's timeout.
        threading.Thread(target=last_reference.clear).start()

    def verify_header(self, header: tuple[int, int], deadline: SharedDeadline) -> None:
        """Broadcast the publisher's (epoch number, version); compare `header` with it on members.

        Raises WeightsError if they differ: the following buckets belong to another version.
        """
        tensor = torch.tensor(header)
        self.broadcast_tensor(tensor, deadline)
        received = tuple(tensor.tolist())
        if received != header:
            raise WeightsError(f"received epoch and version {received}, expected {header}")


def make_gloo_group(store: dist.Store, rank: int, size: int, deadline: SharedDeadline) -> Any:
    """Make a Gloo group of `size` ranks; raise RuntimeError if a rank is missing at `deadline`."""
    return dist.ProcessGroupGloo(store, rank, size, deadline.compute_remaining_time())


def make_nccl_group(store: dist.Store, rank: int, size: int, deadline: SharedDeadline) -> Any:
    """Make an NCCL group of `size` ranks, one per GPU, whose failures never end this process.

    The first broadcast connects the ranks. It raises RuntimeError if a rank is missing
    NCCL_CONNECT_S later.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NCCL_TIMEOUT
    # Otherwise connecting to a dead rank never returns.
    options.config.blocking = 0
    os.environ.update(NCCL_ENV)
    with GROUP_LOCK, override_environment(NCCL_WATCHDOG_ENV):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def serve_readers(host: str, timeout_s: float) -> dist.TCPStore:
    """Start the publisher's TCPStore on a free port of `host`. Raise WeightsError if that fails."""
    try:
        return serve_tcp_store(host, 0, timeout_s)
    except (OSError, RuntimeError) as error:
        raise WeightsError(f"weights: cannot serve readers at {host}: {error}") from error


def join_store(epoch: GroupEpoch, deadline: SharedDeadline) -> dist.TCPStore:
    """Connect a member to the publisher's TCPStore. Raise WeightsError if that fails."""
    # Probe the port first: TCPStore's client retries for long and fills stderr if nothing listens.
    try:
        socket.create_connection(
            (epoch.host, epoch.port), deadline.compute_remaining_time().total_seconds()
        ).close()
    except OSError as error:
        raise WeightsError(f"no publisher at {epoch.host}:{epoch.port}: {error}") from error
    return dist.TCPStore(
        epoch.host,
        epoch.port,
        None,
        False,
        deadline.compute_remaining_time(),
        wait_for_workers=False,
    )


def announce_member(
    store: dist.Store, epoch: GroupEpoch, version: int, member: str, *, has_group: bool
) -> None:
    """Announce in the TCPStore that a member is ready to receive a version.

    `has_group`: the member already has the process group of the epoch. Raises WeightsError if the
    key exists: an earlier process of the same name set it and died, and its place in the group
    cannot be taken over.
    """
    key = epoch.make_ready_key(version, member)
    if store.check([key]):
        raise WeightsError(f"another process of {member} has already announced itself")
    store.set(key, json.dumps(has_group))


def gather_members(
    store: dist.Store, epoch: GroupEpoch, version: int, *, has_group: bool, deadline: SharedDeadline
) -> tuple[str, ...]:
    """Wait for all members, decide whether to send, and return the members that prevent sending.

    These are absent members, and members that lost the epoch's process group since it was created
    (`has_group`: the publisher has it). Empty if the version is sent. The decision goes to the
    TCPStore.
    """
    keys = {member: epoch.make_ready_key(version, member) for member in epoch.members}
    absent: tuple[str, ...] = ()
    if not _wait_for_keys(store, list(keys.values()), deadline):
        absent = tuple(member for member, key in keys.items() if not store.check([key]))
    if not absent:
        absent = tuple(m for m, key in keys.items() if json.loads(store.get(key)) != has_group)
    store.set(epoch.go_ahead_key(version), json.dumps(absent))
    return absent


def wait_for_go_ahead(
    store: dist.Store, epoch: GroupEpoch, version: int, deadline: SharedDeadline
) -> None:
    """Wait for the publisher's decision; raise WeightsError unless the version is sent."""
    key = epoch.go_ahead_key(version)
    if not _wait_for_keys(store, [key], deadline):
        raise WeightsError("timed out waiting for the publisher's decision to send")
    absent = json.loads(store.get(key))
    if absent:
        raise WeightsError(f"{', '.join(absent)} did not join in time")


def _wait_for_keys(store: dist.Store, keys: list[str], deadline: SharedDeadline) -> bool:
    """Wait until all keys are set in the TCPStore; return False if the deadline passes first."""
    # TCPStore.wait writes warnings to stderr when it times out, so poll instead.
    while not store.check(keys):
        if deadline.has_passed():
            return False
        time.sleep(STORE_POLL_S)
    return True


CPU_DEVICE = torch.device("cpu")
TIMEOUT_S = 20.0
"""Timeout of gathering and connecting the members, and of each bucket beyond its transfer time;
then the fallback takes over.
"""
MEMBER_WAIT_FRACTION = 0.25
"""Share of the timeout spent waiting for members; the rest is for creating the process group."""
MAX_SEND_WAIT_S = 60.0
"""Longest wait of a version for the broadcast of the last one, which is then aborted. Meanwhile
other ranks of the trainer may wait in a collective, for `trainer.collective_timeout_s` at most.
"""
READY_BYTES_PER_S = 1e9
"""Slowest rate at which a member finishes its load of the last version before it joins again."""
CONNECT_S_PER_MEMBER = 0.25
"""Time for each member to connect, beyond the share of the timeout."""
ABORT_S = 5.0
"""Time for the thread that sends a broadcast to notice that it is aborted."""
NUM_KEPT_VERSIONS = 2
"""Versions whose keys stay in the TCPStore; a late reader looks up the last version."""


def estimate_join_s(num_bytes: int, num_members: int) -> float:
    """Return the seconds beyond a timeout in which members of a broadcast get ready and connect."""
    return num_bytes / READY_BYTES_PER_S + num_members * CONNECT_S_PER_MEMBER


@dataclass(frozen=True)
class CollectiveHandle:
    """Handle of a bucket: group epoch of its broadcast, and handle in the fallback or None."""

    epoch: GroupEpoch
    fallback_handle: Any


class CollectiveWriter(TransportWriter):
    """Publisher's end of the collective transport: serves a TCPStore, sends from `device`.

    A broadcast takes at most `timeout_s` plus the transfer time at MIN_BYTES_PER_S, and so does
    each of its buckets. A quarter of the timeout is for gathering the members, so a member that is
    absent from the start costs no more than that. A member that dies or hangs later costs the
    timeout of a bucket; the next version waits until then, at most MAX_SEND_WAIT_S. `host`: address
    of the TCPStore. `always_copies`: every version also goes through `fallback`, because the
    publisher could not publish it again.
    """

    def __init__(
        self,
        fallback: TransportWriter,
        *,
        host: str,
        timeout_s: float,
        device: torch.device = CPU_DEVICE,
        always_copies: bool = True,
        num_groups: int = 1,
    ) -> None:
        self._fallback = fallback
        self._always_copies = always_copies
        self._is_copied = True
        self._timeout_s = timeout_s
        self._device = device
        self._store = serve_readers(host, timeout_s)
        self._epoch = GroupEpoch(0, host, self._store.port, (), num_groups)
        self._num_sliced = 0
        self._layouts: Sequence[SliceLayout] = ()
        self._rank_writers: list[CollectiveWriter] = []
        self._readers: tuple[str, ...] = ()
        self._absent_readers: frozenset[str] = frozenset()
        self._group: BroadcastGroup | None = None
        self._send_executor = ThreadPoolExecutor(1, "broadcast")
        self._pending_send: Future[None] | None = None
        self._version = self._committed_version = -1
        self._staging_buffers: list[Array] = []
        self._handles: list[CollectiveHandle] = []
        self._send_deadline = SharedDeadline(0.0)
        self._abort_reason = ""
        self._announced_versions: list[tuple[GroupEpoch, int]] = []
        #: Why the last broadcast failed, with the members involved; None if it succeeded.
        self.send_failure: str | None = None

    def set_readers(self, readers: Readers) -> None:
        """Set the readers that take part in the broadcast from the next version on.

        Aborts a running broadcast to a reader that has left. A generator whose ranks read other
        slices than those of the first one takes whole tensors.
        """
        layouts = next((theirs for theirs in readers.values() if theirs), self._layouts)
        if layouts != self._layouts:
            writers = [self._make_rank_writer(len(layouts)) for _ in layouts]
            self._close_rank_writers()
            self._layouts, self._rank_writers, self._num_sliced = layouts, writers, 0
        split: Readers = {n: () for n, theirs in readers.items() if theirs and theirs == layouts}
        for writer in self._rank_writers:
            writer.set_readers(split)
        self._readers = tuple(name for name in readers if name not in split)
        left = ", ".join(sorted({*self._epoch.members} - {*readers}))
        if left and self._pending_send is not None:
            self._abort_send(f"{left} left")

    def begin_version(self, version: int) -> None:
        """Wait for the previous broadcast, and begin a new group epoch if the members changed.

        Aborts the previous broadcast after MAX_SEND_WAIT_S. Raises WeightsError if it does not end
        then: it still reads the staging buffers, so they cannot be refilled.
        """
        self._wait_for_send()
        self._absent_readers -= {name for name in self._absent_readers if self._has_returned(name)}
        members = tuple(name for name in self._readers if name not in self._absent_readers)
        is_again = version == self._committed_version
        if is_again:
            # Readers that have the version will not take part in a broadcast.
            members = ()
        if self.send_failure is not None:
            # Its thread may still read the buffers, whose contents no reader takes any more.
            self._staging_buffers = []
        if self.send_failure is not None or members != self._epoch.members:
            number = self._epoch.number + 1
            self._epoch = replace(self._epoch, number=number, members=members)
            self._group = None
        has_reached_all = members == self._readers and (
            self._group is not None or bool(self._rank_writers and not members)
        )
        has_reached_ranks = all(writer.has_reached_readers() for writer in self._rank_writers)
        is_copy_needed = is_again or not (has_reached_all and has_reached_ranks)
        self._is_copied = self._always_copies or is_copy_needed
        self._version = version
        self._handles = []
        if self._is_copied:
            self._fallback.begin_version(version)

    def has_reached_readers(self) -> bool:
        """Return whether the last broadcast has reached all readers of the next one."""
        is_done = self._pending_send is None or self._pending_send.done()
        is_complete = is_done and self._group is not None and self.send_failure is None
        return is_complete and self._epoch.members == self._readers

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Return a staging buffer of `num_bytes`; bucket i of every version reuses buffer i."""
        index = len(self._handles)
        if index == len(self._staging_buffers):
            self._staging_buffers.append(allocate_pinned(num_bytes))
        if self._staging_buffers[index].nbytes < num_bytes:
            self._staging_buffers[index] = allocate_pinned(num_bytes)
        return self._staging_buffers[index][:num_bytes]

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> CollectiveHandle:
        """Commit a copy of the bucket to the fallback if readers may need it.

        `commit_version` starts the broadcast.
        """
        copy = self._fallback.commit_bucket(bucket, data) if self._is_copied else None
        handle = CollectiveHandle(self._epoch, copy)
        self._handles.append(handle)
        return handle

    def commit_version(self, manifest: WeightManifest) -> None:
        """Start the broadcast of the version in a thread."""
        if self._is_copied:
            self._fallback.commit_version(_make_fallback_manifest(manifest))
        pairs = zip(self._staging_buffers, manifest.buckets, strict=False)
        buckets = [data[: bucket.num_bytes] for data, bucket in pairs]
        is_again = manifest.version == self._committed_version
        self.rank_manifests = () if is_again else self._send_slices(manifest, buckets)
        self._committed_version = manifest.version
        self.send_failure = None
        self._abort_reason = ""
        join_s = estimate_join_s(manifest.num_bytes, len(self._epoch.members))
        send_s = self._epoch.estimate_send_s(manifest.num_bytes)
        self._send_deadline = SharedDeadline(self._timeout_s + join_s + send_s)
        if self._epoch.members:
            self._pending_send = self._send_executor.submit(
                self._send_version, manifest.version, buckets, join_s
            )

    def _send_slices(
        self, manifest: WeightManifest, buckets: Sequence[Array]
    ) -> tuple[WeightManifest, ...]:
        """Pack the slices of each rank and start their broadcasts; return their manifests."""
        if not any(writer._readers for writer in self._rank_writers):
            return ()
        tensors = view_tensors(manifest, buckets)
        # A buffer has the size of a bucket, unless a single tensor is larger.
        bucket_bytes = min(map(len, self._staging_buffers))
        is_checked = self._num_sliced < NUM_INITIAL_CHECKS
        self._num_sliced += 1

        def send_rank(rank: int) -> WeightManifest:
            layout = self._layouts[rank]
            sent = publish_version(
                iter_slices(rank, layout, tensors),
                version=manifest.version,
                bucket_bytes=bucket_bytes,
                writer=self._rank_writers[rank],
            )
            checksums = {
                make_slice_name(rank, name, index): compute_tensor_checksum(tensors[name][index])
                for name, indices in (layout.items() if is_checked else ())
                for index in indices
            }
            return replace(sent, slice_checksums=checksums)

        with ThreadPoolExecutor(len(self._layouts), "slices") as threads:
            return tuple(threads.map(send_rank, range(len(self._layouts))))

    def _make_rank_writer(self, num_ranks: int) -> "CollectiveWriter":
        """Make the writer of one rank's slices, of which there are no copies for late readers."""
        return CollectiveWriter(
            NoCopies(),
            host=self._epoch.host,
            timeout_s=self._timeout_s,
            device=self._device,
            always_copies=False,
            num_groups=num_ranks + 1,
        )

    def _close_rank_writers(self) -> None:
        for writer in self._rank_writers:
            writer._abort_send("its slices are no longer sent")
            writer.close()

    def close(self) -> None:
        """Wait for a running broadcast, at most MAX_SEND_WAIT_S, and free all resources."""
        try:
            self._wait_for_send()
            self._close_rank_writers()
        finally:
            self._send_executor.shutdown(wait=False)
            self._group = None
            self._fallback.close()

    def _send_version(self, version: int, buckets: Sequence[Array], join_s: float) -> None:
        """Wait for the members and broadcast the version; store an error in `send_failure`."""
        epoch, whole = self._epoch, self._send_deadline
        try:
            has_group = self._group is not None
            member_deadline = SharedDeadline(self._timeout_s * MEMBER_WAIT_FRACTION + join_s)
            absent = gather_members(
                self._store, epoch, version, has_group=has_group, deadline=member_deadline
            )
            self._delete_old_keys(epoch, version)
            if absent:
                self._absent_readers |= set(absent)
                for name in absent:
                    self._store.delete_key(_make_return_key(name))
                raise WeightsError(f"timed out waiting for {', '.join(absent)}")
            connect_s = self._timeout_s * (1 - MEMBER_WAIT_FRACTION) + join_s
            deadline = SharedDeadline(connect_s, whole)
            if self._group is None:
                self._group = BroadcastGroup(
                    self._store, epoch, PUBLISHER_RANK, self._device, deadline
                )
            self._group.verify_header((epoch.number, version), deadline)
            self._group.broadcast_buckets(buckets, self._timeout_s, whole)
        except (RuntimeError, WeightsError) as error:
            members, cause = ", ".join(epoch.members), self._abort_reason or str(error)
            self.send_failure = f"weights version {version} was not sent to {members}: {cause}"

    def _delete_old_keys(self, epoch: GroupEpoch, version: int) -> None:
        """Delete the keys of all but the last NUM_KEPT_VERSIONS versions from the TCPStore."""
        self._announced_versions.append((epoch, version))
        while len(self._announced_versions) > NUM_KEPT_VERSIONS:
            old_epoch, old_version = self._announced_versions.pop(0)
            for key in old_epoch.list_keys(old_version):
                self._store.delete_key(key)

    def _wait_for_send(self) -> None:
        """Wait for the running broadcasts, those of ranks too; abort them after MAX_SEND_WAIT_S.

        Raises WeightsError if that of this writer does not end then.
        """
        sends = {w: w._pending_send for w in (self, *self._rank_writers) if w._pending_send}
        wait(sends.values(), MAX_SEND_WAIT_S)
        for writer, send in sends.items():
            if not send.done():
                waited = f"{MAX_SEND_WAIT_S:g} s after the next version was due"
                writer._abort_send(f"not finished {waited}")
        if self._pending_send is None:
            return
        try:
            self._pending_send.result(ABORT_S)
        except SendTimeoutError as error:
            raise WeightsError(
                f"weights version {self._version} is still being sent to "
                f"{', '.join(self._epoch.members)} after {MAX_SEND_WAIT_S + ABORT_S:g} s"
            ) from error
        self._pending_send = None

    def _abort_send(self, reason: str) -> None:
        self._abort_reason = reason
        self._send_deadline.expire()

    def _has_returned(self, name: str) -> bool:
        """Return True if an absent reader has fetched a version since; clear its store key."""
        return bool(self._store.delete_key(_make_return_key(name)))


class NoCopies(TransportWriter):
    """Fallback of slices: their readers fetch the whole version instead."""

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> None:
        """Return no handle."""


class CollectiveReader(TransportReader):
    """Reader's end of the collective transport: takes part in broadcasts, else uses `fallback`.

    `name` is the reader's name among the members. `fallback_reason` says why the last version came
    through the fallback; None if it did not, or was the first version.
    """

    def __init__(
        self,
        name: str,
        fallback: TransportReader,
        *,
        timeout_s: float,
        device: torch.device = CPU_DEVICE,
        rank: int = 0,
    ) -> None:
        self._name, self._rank = name, rank
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._device = device
        self._address: tuple[str, int] | None = None
        self._store: dist.TCPStore | None = None
        self._epoch: GroupEpoch | None = None
        self._group: BroadcastGroup | None = None
        self._receive_buffers: list[Array] = []
        self._rank_readers: list[CollectiveReader] = []
        self._sliced_version = -1

    def fetch_slices(self, manifest: WeightManifest) -> Sequence[Sequence[Array]]:
        """Receive the slices of all ranks at once, each through the GPU of its rank."""
        manifests, readers = manifest.rank_manifests, self._rank_readers
        # Ranks that received a version take part in no other broadcast of it.
        if not manifests or manifest.version == self._sliced_version:
            return ()
        self._sliced_version = manifest.version
        while len(readers) < len(manifests):
            rank = len(readers)
            device = get_rank_device(self._device, rank)
            settings: dict[str, Any] = {"timeout_s": self._timeout_s, "device": device}
            readers.append(CollectiveReader(self._name, TransportReader(), rank=rank, **settings))
        with ThreadPoolExecutor(len(manifests), "slices") as threads:
            rank_arrays = list(threads.map(CollectiveReader._receive_version, readers, manifests))
        for rank, reader in enumerate(readers):
            if reader.fallback_reason:
                raise WeightsError(f"slices of rank {rank}: {reader.fallback_reason}")
        received = [arrays for arrays in rank_arrays if arrays is not None]
        if len(received) < len(manifests):
            return ()
        self.bytes_fetched += sum(rank_manifest.num_bytes for rank_manifest in manifests)
        return received

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """Receive the version's buckets from the broadcast, or if that fails from the fallback."""
        self.bytes_fetched += manifest.num_bytes
        if not manifest.handles:
            return []
        if (received := self._receive_version(manifest)) is not None:
            return received
        cause = f" ({self.fallback_reason})" if self.fallback_reason else ""
        if manifest.handles[0].fallback_handle is None:
            raise VersionNotStoredError(
                f"weights version {manifest.version} went to its readers only{cause}"
            )
        try:
            return self._fallback.fetch_buckets(_make_fallback_manifest(manifest))
        except WeightsError as error:
            raise WeightsError(f"{error}{cause}") from error

    def _receive_version(self, manifest: WeightManifest) -> list[Array] | None:
        """Receive the version's buckets; if that fails, return None and ask for the next version.

        Sets `fallback_reason` unless this reader joined after the group epoch began.
        """
        self.fallback_reason = None
        epoch = manifest.handles[0].epoch
        join_s = estimate_join_s(manifest.num_bytes, len(epoch.members))
        send_s = epoch.estimate_send_s(manifest.num_bytes)
        deadline = SharedDeadline(self._timeout_s + join_s + send_s)
        try:
            store = self._join_store(epoch, deadline)
            if self._epoch is not None or self._name in epoch.members:
                return self._receive_buckets(store, epoch, manifest, deadline)
        except (RuntimeError, WeightsError) as error:
            self._group = None
            # A group is unusable after any error; the writer begins a new epoch.
            self.fallback_reason = f"weights version {manifest.version} was not sent: {error}"
        self._request_membership()
        return None

    def close(self) -> None:
        """Leave the broadcast group; the other members notice at its next use."""
        self._group = self._store = None
        self._fallback.close()
        for reader in self._rank_readers:
            reader.close()

    def _join_store(self, epoch: GroupEpoch, deadline: SharedDeadline) -> dist.TCPStore:
        """Return the connection to the publisher's TCPStore; reconnect if its address changed."""
        if self._store is None or self._address != (epoch.host, epoch.port):
            self._store = join_store(epoch, deadline)
            self._address = (epoch.host, epoch.port)
            self._group = None
        return self._store

    def _request_membership(self) -> None:
        """Ask the publisher, if reachable, to include this reader in the next group epoch."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(_make_return_key(self._name), "")

    def _receive_buckets(
        self,
        store: dist.TCPStore,
        epoch: GroupEpoch,
        manifest: WeightManifest,
        deadline: SharedDeadline,
    ) -> list[Array]:
        """Take part in the broadcast of a version and return its buckets, read-only."""
        version = manifest.version
        if self._name not in epoch.members:
            raise WeightsError(f"{self._name} is not a member of group epoch {epoch.number}")
        if self._epoch != epoch:
            self._epoch, self._group = epoch, None
        # Kept until the next version if the broadcast fails, which may go on writing to them.
        arrays = self._receive_buffers = []
        announce_member(store, epoch, version, self._name, has_group=self._group is not None)
        join_s = estimate_join_s(manifest.num_bytes, len(epoch.members))
        connect_deadline = SharedDeadline(self._timeout_s + join_s, deadline)
        wait_for_go_ahead(store, epoch, version, connect_deadline)
        if self._group is None:
            rank = epoch.members.index(self._name) + 1
            self._group = BroadcastGroup(store, epoch, rank, self._device, connect_deadline)
        self._group.verify_header((epoch.number, version), connect_deadline)
        self._group.broadcast_buckets(
            _allocate_in_turn(manifest.buckets, self._rank, arrays), self._timeout_s, deadline
        )
        self._receive_buffers = []
        for data in arrays:
            data.flags.writeable = False
        return arrays


def _allocate_in_turn(
    buckets: Sequence[WeightBucket], rank: int, arrays: list[Array]
) -> Iterator[Array]:
    """Yield host memory for each bucket, and append it to `arrays`.

    All of it at once would take a minute to pin for a large model, and the others would wait.
    """
    for bucket in buckets:
        arrays.append(allocate_pinned(bucket.num_bytes, is_shared=True, rank=rank))
        yield arrays[-1]


def _make_fallback_manifest(manifest: WeightManifest) -> WeightManifest:
    """Return the manifest with the handles of the fallback transport."""
    return replace(manifest, handles=tuple(handle.fallback_handle for handle in manifest.handles))


def _make_return_key(name: str) -> str:
    """Return the TCPStore key that a formerly absent reader sets to take part again."""
    return f"back/{name}"


def make_writer(spec: TransportSpec, role: str) -> CollectiveWriter:
    return CollectiveWriter(
        object_store.make_writer(spec, role),
        host=spec.cluster.get_address(),
        timeout_s=TIMEOUT_S,
        device=get_local_device(),
        always_copies=role in spec.copied_roles,
    )


def make_reader(spec: TransportSpec, role: str, reader: str) -> CollectiveReader:
    return CollectiveReader(
        reader,
        object_store.make_reader(spec, role, reader),
        timeout_s=TIMEOUT_S,
        device=get_local_device(),
    )


TRANSPORT = Transport(make_writer, make_reader)
