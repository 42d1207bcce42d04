"""Broadcasts between real processes, and what happens when one of them is not there."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights import WeightManifest
from streamrl.weights.pack import publish_version
from streamrl.weights.transports import collective_group
from streamrl.weights.transports.collective import CollectiveReader, CollectiveWriter
from streamrl.weights.transports.collective_group import SharedDeadline
from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from streamrl.weights.unpack import unpack_tensors
from tests import forked
from tests.weights.local_outlet import LocalInlet, LocalOutlet

pytestmark = pytest.mark.xdist_group("ranks")

TIMEOUT_S = 12.0


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"t{i}": torch.randn(300_000, generator=generator) for i in range(4)}


def is_version(found: dict[str, torch.Tensor], version: int) -> bool:
    wanted = tensors_of(version)
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def follow(pipe: Connection, name: str) -> None:
    """Fetch each manifest that comes; say whether it is right, and why it was no broadcast.

    The number that comes with a manifest is that of the bucket before which to die.
    """
    inlet = CollectiveReader(name, SharedMemoryReader("policy", LocalInlet()), timeout_s=TIMEOUT_S)
    pipe.send("ready")
    while True:
        manifest, dies_at = pipe.recv()
        if dies_at is not None:
            die_before(dies_at)
        found = unpack_tensors(manifest, inlet.fetch_buckets(manifest))
        pipe.send((is_version(found, manifest.version), inlet.fallback_reason))


def die_before(bucket: int) -> None:
    from streamrl.weights.transports.collective_group import BroadcastGroup

    send = BroadcastGroup.broadcast_tensor
    seen = 0

    def broadcast(self: BroadcastGroup, *arguments: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen == bucket + 2:  # the header comes first
            os._exit(1)
        return send(self, *arguments)

    BroadcastGroup.broadcast_tensor = broadcast  # type: ignore[assignment, method-assign]


class Reader:
    """A reader in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pipe, there = forked.context().Pipe()
        self.process = forked.context().Process(target=follow, args=(there, name))
        self.process.start()
        there.close()

    def wait_until_ready(self) -> None:
        """To start a process takes longer than a broadcast may."""
        assert self._pipe.recv() == "ready"

    def pull(self, manifest: WeightManifest, *, dies_at: int | None = None) -> None:
        self._pipe.send((manifest, dies_at))

    def outcome(self) -> tuple[bool, str | None]:
        """Whether the last version came right, and why it came by the fallback if it did."""
        if not self._pipe.poll(60):
            raise TimeoutError(self.name)
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Broadcasting:
    """A publisher here and readers elsewhere."""

    def __init__(self) -> None:
        self.outlet = CollectiveWriter(
            SharedMemoryWriter("broadcast_tensor", LocalOutlet(), keep_versions=2),
            host="127.0.0.1",
            timeout_s=TIMEOUT_S,
        )
        self.readers: list[Reader] = []
        self.version = -1

    def add(self, *names: str) -> None:
        readers = [Reader(name) for name in names]
        for reader in readers:
            reader.wait_until_ready()
        self.readers += readers

    def put(self) -> WeightManifest:
        self.version += 1
        self.outlet.set_readers([reader.name for reader in self.readers])
        return publish_version(
            tensors_of(self.version).items(),
            version=self.version,
            bucket_bytes=1_200_000,
            writer=self.outlet,
        )

    def round(self, readers: Sequence[Reader] | None = None) -> list[tuple[bool, str | None]]:
        """A version, as it came to these readers."""
        manifest = self.put()
        taking_part = self.readers if readers is None else readers
        for reader in taking_part:
            reader.pull(manifest)
        return [reader.outcome() for reader in taking_part]

    def end(self) -> None:
        for reader in self.readers:
            reader.end()
        self.outlet.close()


@pytest.fixture
def cluster() -> Iterator[Broadcasting]:
    made = Broadcasting()
    yield made
    made.end()


@pytest.mark.slow
def test_versions_reach_all_members_and_newcomers_join_a_term(cluster: Broadcasting) -> None:
    cluster.add("a", "b")
    for _ in range(3):
        assert cluster.round() == [(True, None)] * 2
    cluster.add("c")
    newcomer = cluster.readers[2]
    manifest = cluster.put()  # with c
    assert manifest.handles[0].epoch.members == ("a", "b", "c")
    for reader in cluster.readers:
        reader.pull(manifest)
    assert [reader.outcome() for reader in cluster.readers] == [(True, None)] * 3
    early = Reader("d")
    early.wait_until_ready()
    try:
        early.pull(manifest)
        assert early.outcome() == (True, None), "it could not be a member yet"
    finally:
        early.end()
    assert newcomer.process.is_alive()
    assert cluster.round() == [(True, None)] * 3
    cluster.version -= 1  # and once more: what was said of it the first time does not count
    assert cluster.round() == [(True, None)] * 3
    assert cluster.outlet.send_failure is None


@pytest.mark.slow
def test_one_that_dies_in_the_middle_costs_the_others_a_deadline_and_no_bits(
    cluster: Broadcasting,
) -> None:
    cluster.add("a", "b", "c")
    assert cluster.round() == [(True, None)] * 3
    manifest = cluster.put()
    start = time.monotonic()
    a, b, c = cluster.readers
    b.pull(manifest, dies_at=2)
    a.pull(manifest)
    c.pull(manifest)
    assert [reader.outcome()[0] for reader in (a, c)] == [True, True]
    assert time.monotonic() - start < 2 * TIMEOUT_S
    b.process.join(10)
    assert b.process.exitcode == 1
    # It is not known to be dead yet: the next version waits for it, and says so.
    assert [right for right, _ in cluster.round([a, c])] == [True, True]
    manifest = cluster.put()
    assert manifest.handles[0].epoch.members == ("a", "c")
    for reader in (a, c):
        reader.pull(manifest)
    assert [reader.outcome() for reader in (a, c)] == [(True, None)] * 2


@pytest.mark.slow
def test_a_reader_that_skips_a_version_is_named_and_comes_back(cluster: Broadcasting) -> None:
    cluster.add("a", "b", "c")
    a, b, c = cluster.readers
    assert cluster.round() == [(True, None)] * 3
    start = time.monotonic()
    outcomes = cluster.round([a, c])
    assert time.monotonic() - start < TIMEOUT_S
    assert outcomes == [(True, "weights version 1 was not sent: b did not join in time")] * 2
    # It is waited for no more, and takes what it wants from the fallback.
    (first, missed, last) = cluster.round([a, b, c])
    assert cluster.outlet.send_failure is None
    assert first == last == (True, None)
    assert missed == (True, "weights version 2 was not sent: b is not a member of group epoch 2")
    # Since it has read something it is a member again.
    assert cluster.round() == [(True, None)] * 3


def test_nobody_to_send_to_is_no_broadcast() -> None:
    outlet = CollectiveWriter(LocalOutlet(), host="127.0.0.1", timeout_s=2)
    inlet = CollectiveReader("a", LocalInlet(), timeout_s=2)
    manifest = publish_version(tensors_of(0).items(), version=0, bucket_bytes=99, writer=outlet)
    assert is_version(unpack_tensors(manifest, inlet.fetch_buckets(manifest)), 0)
    assert inlet.fallback_reason is None, "it could not be a member yet"
    inlet.close()
    outlet.close()


def test_staging_is_not_laid_anew_while_it_is_sent() -> None:
    outlet = CollectiveWriter(LocalOutlet(), host="127.0.0.1", timeout_s=8)
    outlet.set_readers(["absent"])
    start = time.monotonic()
    publish_version(tensors_of(0).items(), version=0, bucket_bytes=99, writer=outlet)
    # It is gathered for 2 s.
    assert time.monotonic() - start < 1.5
    outlet.begin_version(1)
    assert time.monotonic() - start >= 2
    assert (
        outlet.send_failure
        == "weights version 0 was not sent to absent: timed out waiting for absent"
    )
    outlet.close()


def test_one_that_is_not_there_costs_the_next_version_no_more_than_gathering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective_group, "MIN_BYTES_PER_S", 1e3)  # hours for this version
    outlet = CollectiveWriter(LocalOutlet(), host="127.0.0.1", timeout_s=8)
    outlet.set_readers(["absent"])
    publish_version(tensors_of(0).items(), version=0, bucket_bytes=10**7, writer=outlet)
    start = time.monotonic()
    outlet.begin_version(1)
    assert time.monotonic() - start < 6
    assert (
        outlet.send_failure
        == "weights version 0 was not sent to absent: timed out waiting for absent"
    )
    outlet.close()


def test_one_that_comes_back_at_once_fetches_what_was_sent_to_the_dead(
    cluster: Broadcasting,
) -> None:
    """The place of a dead process in a group is nobody else's: to take it waits for a deadline."""
    cluster.add("a")
    for _ in range(2):
        cluster.round()  # at first it is new, and then in the group
    manifest = cluster.put()
    cluster.readers[0].pull(manifest)
    assert cluster.readers[0].outcome() == (True, None)
    cluster.readers.pop().end()
    cluster.add("a")
    start = time.monotonic()
    cluster.readers[0].pull(manifest)
    came_right, reason = cluster.readers[0].outcome()
    assert came_right and reason is not None and "another process of a" in reason
    assert time.monotonic() - start < TIMEOUT_S / 4
    for _ in range(3):  # one is missed, and the next term has the new process
        outcome = cluster.round()
    assert outcome == [(True, None)]


def round_of(outlet: CollectiveWriter, inlet: CollectiveReader, version: int) -> bool:
    """A version to a reader in this process, and whether it came right."""
    manifest = publish_version(
        tensors_of(version).items(), version=version, bucket_bytes=1_200_000, writer=outlet
    )
    return is_version(unpack_tensors(manifest, inlet.fetch_buckets(manifest)), version)


@pytest.mark.slow
@pytest.mark.parametrize(("bytes_per_s", "arrives"), [(100e6, False), (4e5, True)])
def test_a_broadcast_has_time_for_its_bytes(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, arrives: bool
) -> None:
    send = collective_group.BroadcastGroup.broadcast_tensor

    def slowly(
        self: collective_group.BroadcastGroup, tensor: torch.Tensor, deadline: SharedDeadline
    ) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():  # it sends
            time.sleep(1.2)
        return send(self, tensor, deadline)

    monkeypatch.setattr(collective_group.BroadcastGroup, "broadcast_tensor", slowly)
    monkeypatch.setattr(collective_group, "MIN_BYTES_PER_S", bytes_per_s)
    outlet = CollectiveWriter(LocalOutlet(), host="127.0.0.1", timeout_s=4)
    inlet = CollectiveReader("a", LocalInlet(), timeout_s=4)
    outlet.set_readers(["a"])
    # 4.8 MB in four buckets, which take 6 s with the header.
    assert round_of(outlet, inlet, 0)
    assert (inlet.fallback_reason is None) is arrives
    outlet.close()
    assert (outlet.send_failure is None) is arrives
    inlet.close()


def test_what_is_said_of_old_versions_does_not_pile_up() -> None:
    outlet = CollectiveWriter(LocalOutlet(), host="127.0.0.1", timeout_s=10)
    inlet = CollectiveReader("a", LocalInlet(), timeout_s=10)
    outlet.set_readers(["a"])
    num_keys = []
    for version in range(6):
        assert round_of(outlet, inlet, version)
        assert inlet.fallback_reason is None
        outlet._wait_for_send()
        num_keys.append(outlet._store.num_keys())
    assert num_keys[1:] == num_keys[1:2] * 5
    outlet.close()
    inlet.close()


def test_a_publisher_that_is_gone_leaves_the_fallback() -> None:
    outlet = CollectiveWriter(LocalOutlet(), host="127.0.0.1", timeout_s=1)
    outlet.set_readers(["a"])
    manifest = publish_version(tensors_of(0).items(), version=0, bucket_bytes=10**7, writer=outlet)
    outlet.close()
    del outlet
    inlet = CollectiveReader("a", LocalInlet(), timeout_s=1)
    start = time.monotonic()
    assert is_version(unpack_tensors(manifest, inlet.fetch_buckets(manifest)), 0)
    assert time.monotonic() - start < 5
    assert inlet.fallback_reason is not None


def test_both_ways_closed_is_an_error_that_names_both() -> None:
    class Closed(LocalInlet):
        def fetch_buckets(self, manifest: WeightManifest) -> list[Array]:
            raise WeightsError(f"version {manifest.version}, bucket 0: gone")

    outlet = CollectiveWriter(LocalOutlet(), host="127.0.0.1", timeout_s=8)
    outlet.set_readers(["a", "absent"])
    manifest = publish_version(tensors_of(0).items(), version=0, bucket_bytes=10**7, writer=outlet)
    inlet = CollectiveReader("a", Closed(), timeout_s=8)
    both = r"bucket 0: gone \(weights version 0 was not sent: absent did not join in time"
    with pytest.raises(WeightsError, match=both):
        inlet.fetch_buckets(manifest)
    outlet.close()
