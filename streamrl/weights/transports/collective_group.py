"""Group epochs of the collective transport: fixed members, their process group, and agreement.

A process group works only while every member takes part in every collective. Before each version
all members therefore announce themselves in a TCPStore that the publisher serves, and the publisher
decides whether to send. An absent member costs the others a wait, never a broken group. A failed
broadcast ends the epoch; the next epoch creates a new group.

Groups are created directly, not through torch.distributed's default group, because the process may
already have one (vLLM's workers do).
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.distributed.devices import (
    GPU,
    NCCL_ENV,
    get_current_gpu_stream,
    make_gpu_stream,
    use_gpu_stream,
)
from streamrl.distributed.tcp_store import serve_tcp_store
from streamrl.errors import WeightsError
from streamrl.weights.bucket_memory import as_tensor
from streamrl.weights.manifest import BucketMemory
from streamrl.weights.transport import estimate_send_s

PUBLISHER_RANK = 0
STORE_POLL_S = 0.002
COLLECTIVE_POLL_S = 0.0005
NCCL_TIMEOUT = timedelta(days=1)
"""Timeout of NCCL groups, whose operations `BroadcastGroup` aborts much earlier."""
NCCL_WATCHDOG_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Environment while a group is made: its watchdog then logs a lost peer; by default it would end
the process."""


@dataclass(frozen=True)
class GroupEpoch:
    """Period in which the members of the broadcast group do not change.

    host, port: address of the publisher's TCPStore. members: names of the readers, by rank from 1.
    """

    number: int
    host: str
    port: int
    members: tuple[str, ...]

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
        self._device = device
        self._is_publisher = rank == PUBLISHER_RANK
        # Neither training nor sampling delays a broadcast.
        self._stream = make_gpu_stream() if device.type == GPU else None
        make_group = make_nccl_group if device.type == GPU else make_gloo_group
        self._group = make_group(prefix_store, rank, size, deadline)

    def wait_for_current_stream(self) -> None:
        """Let the next broadcasts write to memory that this thread has just allocated.

        The GPU work that used the memory before may still be queued on this thread's stream.
        """
        if self._stream is not None:
            self._stream.wait_stream(get_current_gpu_stream())

    def broadcast_buckets(
        self, buckets: Iterable[BucketMemory], timeout_s: float, whole: SharedDeadline
    ) -> None:
        """Broadcast buckets in turn, each in `timeout_s` and its transfer time, all until `whole`.

        So a lost member costs the others no more, however large the version is.
        """
        for data in buckets:
            deadline = SharedDeadline(timeout_s + estimate_send_s(data.nbytes), whole)
            self.broadcast_tensor(as_tensor(data), deadline)

    def broadcast_tensor(self, tensor: Tensor, deadline: SharedDeadline) -> None:
        """Broadcast the publisher's `tensor` into the members' `tensor` of the same shape.

        Tensors in host memory travel through a copy on the group's device. The publisher's tensor
        must be complete, the members' free of queued work (`wait_for_current_stream`).
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
        # Without a timeout of its own, a wait for NCCL hides the error of a lost peer.
        work.wait(deadline.compute_remaining_time())

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
    with _set_environment(NCCL_WATCHDOG_ENV):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


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
