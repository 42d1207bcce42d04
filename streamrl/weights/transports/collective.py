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
from streamrl.weights.manifest import WeightBucket, WeightManifest
from streamrl.weights.transport_protocol import TransportReader, TransportWriter, commit_copy
from streamrl.weights.transports.collective_group import (
    PUBLISHER_RANK,
    BroadcastGroup,
    GroupEpoch,
    SharedDeadline,
    announce_member,
    estimate_send_s,
    gather_members,
    join_store,
    serve_readers,
    wait_for_go_ahead,
)

CPU_DEVICE = torch.device("cpu")

MEMBER_WAIT_FRACTION = 0.25
"""Part of a timeout that the publisher waits for members; the rest is for the group and what is
sent, beside what the bytes take."""
DEADLINE_GRACE_S = 5.0
"""How much longer than it may take a broadcast is waited for, s: deadlines are not kept to the
millisecond."""
NUM_KEPT_VERSIONS = 2
"""Of how many versions the store keeps what was said: one who comes late looks for the last."""


@dataclass(frozen=True)
class CollectiveHandle:
    """The term in which a bucket is sent, its number, and its handle in the fallback."""

    epoch: GroupEpoch
    bucket: int
    fallback_handle: Any


class CollectiveWriter:
    """The publisher's end, reached by others at `host`; what is sent is on `device`.

    A broadcast takes at most `timeout_s` and what its bytes take at SLOW_BYTES_PER_S. A quarter of
    the timeout is for gathering the members: no more is lost where one is not there. One that dies
    or hangs later on may cost all of it, of which the next version waits for what is left.
    """

    def __init__(
        self,
        fallback: TransportWriter,
        *,
        host: str,
        timeout_s: float,
        device: torch.device = CPU_DEVICE,
    ) -> None:
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._device = device
        self._store = serve_readers(host, timeout_s)
        self._epoch = GroupEpoch(0, host, self._store.port, ())
        self._readers: tuple[str, ...] = ()
        self._absent_readers: frozenset[str] = frozenset()
        self._group: BroadcastGroup | None = None
        self._send_executor = ThreadPoolExecutor(1, "broadcast")
        self._pending_send: Future[None] | None = None
        self._version = -1
        self._staging_buffers: list[Array] = []
        self._handles: list[CollectiveHandle] = []
        self._send_timeout_s = 0.0
        self._announced_versions: list[tuple[GroupEpoch, int]] = []
        #: Why the last broadcast failed and who was waited for; None if it did not fail.
        self.send_failure: str | None = None

    def set_readers(self, names: Sequence[str]) -> None:
        """Who takes part from the next version on."""
        self._readers = tuple(names)

    def begin_version(self, version: int) -> None:
        """Wait until the last version is sent, and begin a term if the members change.

        A broadcast that keeps its deadlines ends in time. Raises WeightsError if one does not: what
        it reads cannot be laid anew.
        """
        self._wait_for_send()
        self._absent_readers -= {name for name in self._absent_readers if self._has_returned(name)}
        members = tuple(name for name in self._readers if name not in self._absent_readers)
        if self.send_failure is not None:
            # What failed may still be reading from it.
            self._staging_buffers = []
        # What was said of a version that comes once more is still there.
        is_over = self.send_failure is not None or version == self._version
        if is_over or members != self._epoch.members:
            number = self._epoch.number + 1
            self._epoch = replace(self._epoch, number=number, members=members)
            self._group = None
        self._version = version
        self._handles = []
        self._fallback.begin_version(version)

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Staging, the same for the buckets of one number."""
        index = len(self._handles)
        if index == len(self._staging_buffers):
            self._staging_buffers.append(np.empty(0, np.uint8))
        if self._staging_buffers[index].nbytes < num_bytes:
            self._staging_buffers[index] = np.zeros(num_bytes, np.uint8)
        return self._staging_buffers[index][:num_bytes]

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> CollectiveHandle:
        """Seal a copy in the fallback."""
        copy = commit_copy(self._fallback, bucket, data)
        handle = CollectiveHandle(self._epoch, len(self._handles), copy)
        self._handles.append(handle)
        return handle

    def commit_version(self, manifest: WeightManifest) -> None:
        """Send the version, in a thread, once its members are there."""
        self._fallback.commit_version(_fallback_manifest(manifest))
        pairs = zip(self._staging_buffers, manifest.buckets, strict=False)
        buckets = [data[: bucket.num_bytes] for data, bucket in pairs]
        self.send_failure = None
        self._send_timeout_s = self._timeout_s + estimate_send_s(manifest.num_bytes)
        if self._epoch.members:
            self._pending_send = self._send_executor.submit(
                self._send_version, manifest.version, buckets
            )

    def close(self) -> None:
        """Wait for what is being sent, at most as long as that may take."""
        try:
            self._wait_for_send()
        finally:
            self._send_executor.shutdown(wait=False)
            self._group = None
            self._fallback.close()

    def _send_version(self, version: int, buckets: Sequence[Array]) -> None:
        """A broadcast, from the wait for its members on; what goes wrong is kept in `failure`."""
        term = self._epoch
        try:
            has_group = self._group is not None
            patience = SharedDeadline(self._timeout_s * MEMBER_WAIT_FRACTION)
            absent = gather_members(
                self._store, term, version, has_group=has_group, deadline=patience
            )
            self._delete_old_keys(term, version)
            if absent:
                self._absent_readers |= set(absent)
                for name in absent:
                    self._store.delete_key(_return_key(name))
                raise WeightsError(f"waited for {', '.join(absent)}")
            deadline = SharedDeadline(self._send_timeout_s - self._timeout_s * MEMBER_WAIT_FRACTION)
            if self._group is None:
                self._group = BroadcastGroup(
                    self._store, term, PUBLISHER_RANK, self._device, deadline
                )
            self._group.verify_header((term.number, version), deadline)
            for data in buckets:
                self._group.broadcast_tensor(torch.from_numpy(data), deadline)
        except (RuntimeError, WeightsError) as error:
            members = ", ".join(term.members)
            self.send_failure = f"weights version {version} was not sent to {members}: {error}"

    def _delete_old_keys(self, term: GroupEpoch, version: int) -> None:
        """Take away what was said of older versions than this one and the last."""
        self._announced_versions.append((term, version))
        while len(self._announced_versions) > NUM_KEPT_VERSIONS:
            old, number = self._announced_versions.pop(0)
            for key in old.list_keys(number):
                self._store.delete_key(key)

    def _wait_for_send(self) -> None:
        sending, self._pending_send = self._pending_send, None
        if sending is None:
            return
        try:
            sending.result(self._send_timeout_s + DEADLINE_GRACE_S)
        except WaitedTooLong as error:
            self._pending_send = sending
            raise WeightsError(
                f"weights version {self._version} is still being sent to "
                f"{', '.join(self._epoch.members)} after"
                f" {self._send_timeout_s + DEADLINE_GRACE_S:g} s"
            ) from error

    def _has_returned(self, name: str) -> bool:
        """Whether one that was missed has read something since."""
        return bool(self._store.delete_key(_return_key(name)))


class CollectiveReader:
    """The end of the reader `name`: takes part in broadcasts, and fetches by `fallback` else.

    `failure` says why the last version came by the fallback; None if it did not, or was the first.
    """

    def __init__(
        self,
        name: str,
        fallback: TransportReader,
        *,
        timeout_s: float,
        device: torch.device = CPU_DEVICE,
    ) -> None:
        self._name = name
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._device = device
        self._address: tuple[str, int] | None = None
        self._store: dist.TCPStore | None = None
        self._epoch: GroupEpoch | None = None
        self._group: BroadcastGroup | None = None
        self.bytes_fetched = 0
        self.fallback_reason: str | None = None

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """The buckets as they are sent, or from the fallback once a broadcast has had its time."""
        self.fallback_reason = None
        self.bytes_fetched += manifest.num_bytes
        if not manifest.handles:
            return []
        deadline = SharedDeadline(self._timeout_s + estimate_send_s(manifest.num_bytes))
        term = manifest.handles[0].epoch
        try:
            store = self._join_store(term, deadline)
            if not self._is_new_member(term):
                return self._receive_buckets(store, term, manifest, deadline)
        except (RuntimeError, WeightsError) as error:
            self._group = None
            self.fallback_reason = f"weights version {manifest.version} was not sent: {error}"
        self._announce_return()
        try:
            return self._fallback.fetch_buckets(_fallback_manifest(manifest))
        except WeightsError as error:
            why = f" ({self.fallback_reason})" if self.fallback_reason else ""
            raise WeightsError(f"{error}{why}") from error

    def close(self) -> None:
        """Leave the group; the others find out when it is used."""
        self._group = self._store = None
        self._fallback.close()

    def _join_store(self, term: GroupEpoch, deadline: SharedDeadline) -> dist.TCPStore:
        """The publisher's store."""
        if self._store is None or self._address != (term.host, term.port):
            self._store = join_store(term, deadline)
            self._address = (term.host, term.port)
            self._group = None
        return self._store

    def _is_new_member(self, term: GroupEpoch) -> bool:
        """Whether we have never been a member, and could not be yet: the next term knows us."""
        return self._epoch is None and self._name not in term.members

    def _announce_return(self) -> None:
        """Tell the publisher, if it can be reached, that we are there for the next term."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(_return_key(self._name), "")

    def _receive_buckets(
        self,
        store: dist.TCPStore,
        term: GroupEpoch,
        manifest: WeightManifest,
        deadline: SharedDeadline,
    ) -> list[Array]:
        version = manifest.version
        if self._name not in term.members:
            raise WeightsError(f"{self._name} is no member of term {term.number}")
        if self._epoch != term:
            self._epoch, self._group = term, None
        announce_member(store, term, version, self._name, has_group=self._group is not None)
        wait_for_go_ahead(store, term, version, deadline)
        if self._group is None:
            rank = term.members.index(self._name) + 1
            self._group = BroadcastGroup(store, term, rank, self._device, deadline)
        self._group.verify_header((term.number, version), deadline)
        arrays = []
        for bucket in manifest.buckets:
            room = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            data = self._group.broadcast_tensor(room, deadline).numpy()
            data.flags.writeable = False
            arrays.append(data)
        return arrays


def _fallback_manifest(manifest: WeightManifest) -> WeightManifest:
    return replace(manifest, handles=tuple(handle.fallback_handle for handle in manifest.handles))


def _return_key(name: str) -> str:
    return f"back/{name}"
