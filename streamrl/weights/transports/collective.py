"""Weights as a broadcast: the publisher sends a version once, to all members together.

Buckets are laid into staging of the publisher's and sent by a thread of its own while the trainer
goes on. Each also goes through another transport, the fallback, which serves whoever is no member,
comes too late, or was in a broadcast that failed. `members` has how they agree.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.manifest import Bucket, WeightManifest
from streamrl.weights.transport_protocol import Inlet, Outlet, seal_copy
from streamrl.weights.transports.collective_group import (
    PUBLISHER_RANK,
    Deadline,
    Group,
    Term,
    announce,
    gather,
    join_store,
    sending_s,
    serve_readers,
    verdict,
)

CPU = torch.device("cpu")

GATHERING_SHARE = 0.25
"""Part of a timeout that the publisher waits for members; the rest is for the group and what is
sent, beside what the bytes take."""
SPARE_S = 5.0
"""How much longer than it may take a broadcast is waited for, s: deadlines are not kept to the
millisecond."""
VERSIONS_TOLD = 2
"""Of how many versions the store keeps what was said: one who comes late looks for the last."""


@dataclass(frozen=True)
class CollectiveHandle:
    """The term in which a bucket is sent, its number, and its handle in the fallback."""

    term: Term
    bucket: int
    fallback: Any


class CollectiveOutlet:
    """The publisher's end, reached by others at `host`; what is sent is on `device`.

    A broadcast takes at most `timeout_s` and what its bytes take at SLOW_BYTES_PER_S. A quarter of
    the timeout is for gathering the members: no more is lost where one is not there. One that dies
    or hangs later on may cost all of it, of which the next version waits for what is left.
    """

    def __init__(
        self, fallback: Outlet, *, host: str, timeout_s: float, device: torch.device = CPU
    ) -> None:
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._device = device
        self._store = serve_readers(host, timeout_s)
        self._term = Term(0, host, self._store.port, ())
        self._readers: tuple[str, ...] = ()
        self._absent: frozenset[str] = frozenset()
        self._group: Group | None = None
        self._sender = ThreadPoolExecutor(1, "broadcast")
        self._sending: Future[None] | None = None
        self._version = -1
        self._staging: list[Array] = []
        self._handles: list[CollectiveHandle] = []
        self._limit_s = 0.0
        self._told: list[tuple[Term, int]] = []
        #: Why the last broadcast failed and who was waited for; None if it did not fail.
        self.failure: str | None = None

    def set_readers(self, names: Sequence[str]) -> None:
        """Who takes part from the next version on."""
        self._readers = tuple(names)

    def begin(self, version: int) -> None:
        """Wait until the last version is sent, and begin a term if the members change.

        A broadcast that keeps its deadlines ends in time. Raises WeightsError if one does not: what
        it reads cannot be laid anew.
        """
        self._wait_until_sent()
        self._absent -= {name for name in self._absent if self._is_back(name)}
        members = tuple(name for name in self._readers if name not in self._absent)
        if self.failure is not None:
            # What failed may still be reading from it.
            self._staging = []
        # What was said of a version that comes once more is still there.
        is_over = self.failure is not None or version == self._version
        if is_over or members != self._term.members:
            number = self._term.number + 1
            self._term = replace(self._term, number=number, members=members)
            self._group = None
        self._version = version
        self._handles = []
        self._fallback.begin(version)

    def room(self, num_bytes: int) -> Array:
        """Staging, the same for the buckets of one number."""
        index = len(self._handles)
        if index == len(self._staging):
            self._staging.append(np.empty(0, np.uint8))
        if self._staging[index].nbytes < num_bytes:
            self._staging[index] = np.zeros(num_bytes, np.uint8)
        return self._staging[index][:num_bytes]

    def seal(self, bucket: Bucket, data: Array) -> CollectiveHandle:
        """Seal a copy in the fallback."""
        copy = seal_copy(self._fallback, bucket, data)
        handle = CollectiveHandle(self._term, len(self._handles), copy)
        self._handles.append(handle)
        return handle

    def finish(self, manifest: WeightManifest) -> None:
        """Send the version, in a thread, once its members are there."""
        self._fallback.finish(_of_fallback(manifest))
        pairs = zip(self._staging, manifest.buckets, strict=False)
        buckets = [data[: bucket.num_bytes] for data, bucket in pairs]
        self.failure = None
        self._limit_s = self._timeout_s + sending_s(manifest.num_bytes)
        if self._term.members:
            self._sending = self._sender.submit(self._send, manifest.version, buckets)

    def close(self) -> None:
        """Wait for what is being sent, at most as long as that may take."""
        try:
            self._wait_until_sent()
        finally:
            self._sender.shutdown(wait=False)
            self._group = None
            self._fallback.close()

    def _send(self, version: int, buckets: Sequence[Array]) -> None:
        """A broadcast, from the wait for its members on; what goes wrong is kept in `failure`."""
        term = self._term
        try:
            has_group = self._group is not None
            patience = Deadline(self._timeout_s * GATHERING_SHARE)
            absent = gather(self._store, term, version, has_group=has_group, deadline=patience)
            self._forget_all_but(term, version)
            if absent:
                self._absent |= set(absent)
                for name in absent:
                    self._store.delete_key(_back_key(name))
                raise WeightsError(f"waited for {', '.join(absent)}")
            deadline = Deadline(self._limit_s - self._timeout_s * GATHERING_SHARE)
            if self._group is None:
                self._group = Group(self._store, term, PUBLISHER_RANK, self._device, deadline)
            self._group.check_header((term.number, version), deadline)
            for data in buckets:
                self._group.broadcast(torch.from_numpy(data), deadline)
        except (RuntimeError, WeightsError) as error:
            members = ", ".join(term.members)
            self.failure = f"weights version {version} was not sent to {members}: {error}"

    def _forget_all_but(self, term: Term, version: int) -> None:
        """Take away what was said of older versions than this one and the last."""
        self._told.append((term, version))
        while len(self._told) > VERSIONS_TOLD:
            old, number = self._told.pop(0)
            for key in old.keys(number):
                self._store.delete_key(key)

    def _wait_until_sent(self) -> None:
        sending, self._sending = self._sending, None
        if sending is None:
            return
        try:
            sending.result(self._limit_s + SPARE_S)
        except WaitedTooLong as error:
            self._sending = sending
            raise WeightsError(
                f"weights version {self._version} is still being sent to "
                f"{', '.join(self._term.members)} after {self._limit_s + SPARE_S:g} s"
            ) from error

    def _is_back(self, name: str) -> bool:
        """Whether one that was missed has read something since."""
        return bool(self._store.delete_key(_back_key(name)))


class CollectiveInlet:
    """The end of the reader `name`: takes part in broadcasts, and fetches by `fallback` else.

    `failure` says why the last version came by the fallback; None if it did not, or was the first.
    """

    def __init__(
        self, name: str, fallback: Inlet, *, timeout_s: float, device: torch.device = CPU
    ) -> None:
        self._name = name
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._device = device
        self._address: tuple[str, int] | None = None
        self._store: dist.TCPStore | None = None
        self._term: Term | None = None
        self._group: Group | None = None
        self.bytes_fetched = 0
        self.failure: str | None = None

    def fetch(self, manifest: WeightManifest) -> Sequence[Array]:
        """The buckets as they are sent, or from the fallback once a broadcast has had its time."""
        self.failure = None
        self.bytes_fetched += manifest.num_bytes
        if not manifest.handles:
            return []
        deadline = Deadline(self._timeout_s + sending_s(manifest.num_bytes))
        term = manifest.handles[0].term
        try:
            store = self._join(term, deadline)
            if not self._is_new_to(term):
                return self._receive(store, term, manifest, deadline)
        except (RuntimeError, WeightsError) as error:
            self._group = None
            self.failure = f"weights version {manifest.version} was not sent: {error}"
        self._say_back()
        try:
            return self._fallback.fetch(_of_fallback(manifest))
        except WeightsError as error:
            why = f" ({self.failure})" if self.failure else ""
            raise WeightsError(f"{error}{why}") from error

    def close(self) -> None:
        """Leave the group; the others find out when it is used."""
        self._group = self._store = None
        self._fallback.close()

    def _join(self, term: Term, deadline: Deadline) -> dist.TCPStore:
        """The publisher's store."""
        if self._store is None or self._address != (term.host, term.port):
            self._store = join_store(term, deadline)
            self._address = (term.host, term.port)
            self._group = None
        return self._store

    def _is_new_to(self, term: Term) -> bool:
        """Whether we have never been a member, and could not be yet: the next term knows us."""
        return self._term is None and self._name not in term.members

    def _say_back(self) -> None:
        """Tell the publisher, if it can be reached, that we are there for the next term."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(_back_key(self._name), "")

    def _receive(
        self, store: dist.TCPStore, term: Term, manifest: WeightManifest, deadline: Deadline
    ) -> list[Array]:
        version = manifest.version
        if self._name not in term.members:
            raise WeightsError(f"{self._name} is no member of term {term.number}")
        if self._term != term:
            self._term, self._group = term, None
        announce(store, term, version, self._name, has_group=self._group is not None)
        verdict(store, term, version, deadline)
        if self._group is None:
            rank = term.members.index(self._name) + 1
            self._group = Group(store, term, rank, self._device, deadline)
        self._group.check_header((term.number, version), deadline)
        arrays = []
        for bucket in manifest.buckets:
            room = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            data = self._group.broadcast(room, deadline).numpy()
            data.flags.writeable = False
            arrays.append(data)
        return arrays


def _of_fallback(manifest: WeightManifest) -> WeightManifest:
    return replace(manifest, handles=tuple(handle.fallback for handle in manifest.handles))


def _back_key(name: str) -> str:
    return f"back/{name}"
