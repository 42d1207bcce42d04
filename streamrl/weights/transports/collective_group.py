"""Who takes part in a broadcast: a term of fixed members, their group, and how they agree.

A group is good only as long as every member takes part in everything, so before each version all
say at a store, which the publisher serves, that they are there; then the publisher says whether it
goes ahead. One that is missing costs the others a wait for it, never a broken group. A broadcast
that fails ends the term, and the next one has a group of its own.

Groups are made directly, beside whatever default group a process has (vLLM's has one).
"""

import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.distributed.tcp_store import serve_tcp_store
from streamrl.errors import WeightsError

PUBLISHER_RANK = 0
STORE_POLL_S = 0.002
MIN_BYTES_PER_S = 100e6
"""What a broadcast is given time for, bytes/s: about a gigabit Ethernet."""


@dataclass(frozen=True)
class GroupEpoch:
    """A time in which the members of a broadcast are the same. The store is at `host`:`port`."""

    number: int
    host: str
    port: int
    members: tuple[str, ...]

    def go_ahead_key(self, version: int) -> str:
        """Where the publisher says whether it sends a version."""
        return f"{self.number}/{version}/verdict"

    def list_keys(self, version: int) -> list[str]:
        """All that is said of a version."""
        return [self.go_ahead_key(version), *(self.ready_key(version, m) for m in self.members)]

    def ready_key(self, version: int, member: str) -> str:
        """Where a member says that it waits for a version."""
        return f"{self.number}/{version}/here/{member}"


def estimate_send_s(num_bytes: int) -> float:
    """What so many bytes take where the network is slow, s."""
    return num_bytes / MIN_BYTES_PER_S


class SharedDeadline:
    """A point in time that several waits share."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def has_passed(self) -> bool:
        """Whether nothing is left of it."""
        return time.monotonic() >= self._end_s

    def remaining_time(self) -> timedelta:
        """What is left of it; never nothing at all, which some take for no deadline."""
        return timedelta(seconds=max(self._end_s - time.monotonic(), 0.01))


class BroadcastGroup:
    """The members of a term and the publisher, as one of them sees them.

    To make one waits until all do. Everything raises RuntimeError when a deadline passes or a peer
    is lost; the group is of no more use then. Tensors are on `device`, which says how they travel.
    """

    def __init__(
        self,
        store: dist.Store,
        term: GroupEpoch,
        rank: int,
        device: torch.device,
        deadline: SharedDeadline,
    ) -> None:
        own = dist.PrefixStore(f"{term.number}/group", store)
        size = len(term.members) + 1
        self._device = device
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = deadline.remaining_time()
            self._group = dist.ProcessGroupNCCL(own, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(own, rank, size, deadline.remaining_time())

    def broadcast_tensor(self, tensor: Tensor, deadline: SharedDeadline) -> Tensor:
        """The publisher's `tensor`, on the processor; others give one of the same shape to fill."""
        there = tensor.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = PUBLISHER_RANK
        options.timeout = deadline.remaining_time()
        self._group.broadcast([there], options).wait(deadline.remaining_time())
        return there.cpu()

    def verify_header(self, header: tuple[int, int], deadline: SharedDeadline) -> None:
        """Send, or receive and compare, the numbers of term and version.

        Raises WeightsError for others than these: what follows is not what is wanted.
        """
        found = tuple(self.broadcast_tensor(torch.tensor(header), deadline).tolist())
        if found != header:
            raise WeightsError(f"term and version {found} came, wanted {header}")


def serve_readers(host: str, timeout_s: float) -> dist.TCPStore:
    """The publisher's store, at a port nobody uses. Raises WeightsError if it cannot be."""
    try:
        return serve_tcp_store(host, 0, timeout_s)
    except (OSError, RuntimeError) as error:
        raise WeightsError(f"weights: cannot serve readers at {host}: {error}") from error


def join_store(term: GroupEpoch, deadline: SharedDeadline) -> dist.TCPStore:
    """A member's way to the publisher's store. Raises WeightsError if there is none."""
    # Where nobody listens the store's own client tries for long, and fills standard error.
    try:
        socket.create_connection(
            (term.host, term.port), deadline.remaining_time().total_seconds()
        ).close()
    except OSError as error:
        raise WeightsError(f"no publisher at {term.host}:{term.port}: {error}") from error
    return dist.TCPStore(
        term.host, term.port, None, False, deadline.remaining_time(), wait_for_workers=False
    )


def announce_member(
    store: dist.Store, term: GroupEpoch, version: int, member: str, *, has_group: bool
) -> None:
    """Say that a member waits for a version.

    Raises WeightsError if it was said before: by a process of that name that has died since, whose
    place in the group is nobody else's.
    """
    key = term.ready_key(version, member)
    if store.check([key]):
        raise WeightsError(f"another process of {member} waited for it")
    store.set(key, json.dumps(has_group))


def gather_members(
    store: dist.Store, term: GroupEpoch, version: int, *, has_group: bool, deadline: SharedDeadline
) -> tuple[str, ...]:
    """Wait for all members, and tell them whether to go on; who cannot is returned.

    That is who is not there, or was in another process when the group was made.
    """
    keys = {member: term.ready_key(version, member) for member in term.members}
    absent: tuple[str, ...] = ()
    if not _wait_for_keys(store, list(keys.values()), deadline):
        absent = tuple(member for member, key in keys.items() if not store.check([key]))
    if not absent:
        absent = tuple(m for m, key in keys.items() if json.loads(store.get(key)) != has_group)
    store.set(term.go_ahead_key(version), json.dumps(absent))
    return absent


def wait_for_go_ahead(
    store: dist.Store, term: GroupEpoch, version: int, deadline: SharedDeadline
) -> None:
    """Wait for what the publisher says. Raises WeightsError if it does not send the version."""
    key = term.go_ahead_key(version)
    if not _wait_for_keys(store, [key], deadline):
        raise WeightsError("the publisher did not say in time whether it sends it")
    absent = json.loads(store.get(key))
    if absent:
        raise WeightsError(f"{', '.join(absent)} did not come")


def _wait_for_keys(store: dist.Store, keys: list[str], deadline: SharedDeadline) -> bool:
    """Whether all keys are set before the deadline."""
    # The store's own wait writes warnings to standard error when its time is over.
    while not store.check(keys):
        if deadline.has_passed():
            return False
        time.sleep(STORE_POLL_S)
    return True
