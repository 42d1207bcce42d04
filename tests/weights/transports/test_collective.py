"""Broadcasts between real processes, including processes that are absent or die."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import VersionNotStoredError, WeightsError
from streamrl.messages import Array
from streamrl.weights import WeightManifest, transport
from streamrl.weights.buckets import publish_version, unpack_slices
from streamrl.weights.rank_slices import SliceLayout, iter_slices
from streamrl.weights.transports import collective
from streamrl.weights.transports.collective import (
    CollectiveReader,
    CollectiveWriter,
    SharedDeadline,
)
from tests.weights.broadcast_processes import (
    LAYOUTS,
    TIMEOUT_S,
    VERSIONS,
    Broadcasting,
    Reader,
    fetch_slices,
)
from tests.weights.local_transport import LocalReader, LocalWriter, act_in_broadcast

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture
def cluster() -> Iterator[Broadcasting]:
    publisher = Broadcasting()
    yield publisher
    publisher.end()


@pytest.mark.slow
def test_versions_reach_all_members_and_newcomers_join_the_next_epoch(cluster: Broadcasting):
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
    try:
        early.pull(manifest)
        assert early.outcome() == (True, None), "a new reader is not a member yet"
    finally:
        early.end()
    assert newcomer.process.is_alive()
    assert cluster.round() == [(True, None)] * 3
    cluster.version -= 1  # published again: no broadcast, as readers that have it would not join
    assert [is_right for is_right, _ in cluster.round()] == [True] * 3
    assert cluster.round() == [(True, None)] * 3
    assert cluster.writer.send_failure is None


def test_versions_that_all_readers_receive_are_not_copied_to_the_fallback():
    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=8, always_copies=False)
    member = CollectiveReader("a", LocalReader(), timeout_s=8)
    writer.set_readers({"a": ()})
    copies, num_keys = [], []
    for version in range(4):
        manifest = VERSIONS.publish(writer, version)
        assert VERSIONS.fetch(member, manifest)
        assert member.fallback_reason is None
        copies.append(manifest.handles[0].fallback_handle is not None)
        writer._wait_for_send()
        num_keys.append(writer._store.num_keys())
    assert copies == [True, False, False, False]
    assert num_keys[1:] == num_keys[1:2] * 3, "the store's keys of old versions are deleted"
    newcomer = CollectiveReader("b", LocalReader(), timeout_s=8)
    with pytest.raises(WeightsError, match="weights version 3 went to its readers only"):
        newcomer.fetch_buckets(manifest)
    # Two refused loads make the coordinator publish the version again.
    writer.set_readers({"a": (), "b": ()})
    assert VERSIONS.fetch(newcomer, VERSIONS.publish(writer, 3))
    manifest = VERSIONS.publish(writer, 4)
    assert manifest.handles[0].epoch.members == ("a", "b")
    assert manifest.handles[0].fallback_handle is not None, "a new group may fail"
    for end in (member, newcomer, writer):
        end.close()


@pytest.fixture
def slices() -> Iterator[tuple[CollectiveWriter, dict[str, CollectiveReader]]]:
    """A writer that copies only what it must, and readers a and b."""
    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=4, always_copies=False)
    readers = {name: CollectiveReader(name, LocalReader(), timeout_s=4) for name in "ab"}
    yield writer, readers
    ends: Sequence[CollectiveReader | CollectiveWriter] = (*readers.values(), writer)
    for end in ends:
        end.close()


def test_each_rank_receives_its_slices_beside_readers_of_whole_versions(slices: Any):
    writer, readers = slices
    writer.set_readers({"a": LAYOUTS, "b": ()})
    for version in range(2):
        manifest = VERSIONS.publish(writer, version)
        with ThreadPoolExecutor() as threads:
            sliced = threads.submit(fetch_slices, readers["a"], manifest)
            assert VERSIONS.fetch(readers["b"], manifest) and sliced.result()
        assert readers["b"].fetch_slices(manifest) == ()
    sent = [rank.num_bytes for rank in manifest.rank_manifests]
    assert sent == [4 * 360_000, 4 * 540_000]
    assert readers["a"].bytes_fetched == 2 * sum(sent)
    assert manifest.handles[0].fallback_handle is None, "version 0 reached both"
    writer.set_readers({"a": LAYOUTS, "b": LAYOUTS[::-1]})
    manifest = VERSIONS.publish(writer, 2)
    assert fetch_slices(readers["a"], manifest)
    assert VERSIONS.fetch(readers["b"], manifest), "other slices than those of the first reader"


def test_a_version_that_the_ranks_miss_is_stored_when_it_is_published_again(slices: Any):
    writer, readers = slices
    writer.set_readers({"a": LAYOUTS})
    assert fetch_slices(readers["a"], VERSIONS.publish(writer, 0))
    manifest = VERSIONS.publish(writer, 1)
    newcomer = readers["b"]
    with pytest.raises(VersionNotStoredError, match="went to its readers only"):
        newcomer.fetch_buckets(manifest)
    assert fetch_slices(readers["a"], manifest)
    manifest = VERSIONS.publish(writer, 1)
    assert manifest.rank_manifests == ()
    assert VERSIONS.fetch(newcomer, manifest)


def test_a_rank_that_misses_a_broadcast_is_named_and_takes_part_in_the_next(slices: Any):
    writer, readers = slices
    a = readers["a"]
    writer.set_readers({"a": LAYOUTS})
    assert fetch_slices(a, VERSIONS.publish(writer, 0))
    a._rank_readers[1].close()  # it loses its group
    manifest = VERSIONS.publish(writer, 1)
    with pytest.raises(WeightsError, match="slices of rank 1: weights version 1 was not sent"):
        a.fetch_slices(manifest)
    for _ in range(2):
        with pytest.raises(VersionNotStoredError):
            a.fetch_buckets(manifest)
        assert a.fetch_slices(manifest) == (), "rank 0 has them, and keeps its group"
    assert VERSIONS.fetch(a, VERSIONS.publish(writer, 1))
    for version, is_copied in ((2, True), (3, False)):
        manifest = VERSIONS.publish(writer, version)
        assert (manifest.handles[0].fallback_handle is not None) == is_copied
        assert fetch_slices(a, manifest)


def test_a_slice_from_another_place_is_refused_naming_the_rank(
    slices: Any, monkeypatch: pytest.MonkeyPatch
):
    writer, readers = slices

    def take_other_half(rank: int, layout: SliceLayout, tensors: Any) -> Iterator[tuple[str, Any]]:
        for name, part in iter_slices(rank, layout, tensors):
            yield name, tensors["t2"][: len(part)] if name.startswith("1/t3") else part

    monkeypatch.setattr(collective, "iter_slices", take_other_half)
    writer.set_readers({"a": LAYOUTS})
    for version in range(3):
        manifest = VERSIONS.publish(writer, version)
        with pytest.raises(WeightsError, match=r"rank 1: 1/t3\[0:300000\] is not what was publ"):
            unpack_slices(manifest, readers["a"].fetch_slices(manifest))


def test_deadlines_of_ranks_allow_for_all_that_share_the_publishers_network(slices: Any):
    writer, _ = slices
    writer.set_readers({"a": LAYOUTS})
    manifest = VERSIONS.publish(writer, 0)
    alone = transport.estimate_send_s(manifest.num_bytes)
    for sent in manifest.rank_manifests:
        epoch = sent.handles[0].epoch
        expected = pytest.approx(3 * alone)  # of two ranks, and of whole tensors
        assert epoch.estimate_send_s(manifest.num_bytes) == expected


def test_groups_made_at_once_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch):
    (name,), barrier = collective.NCCL_WATCHDOG_ENV, threading.Barrier(4)
    seen: list[str | None] = []

    def make(*_: Any) -> None:
        time.sleep(0.01)
        seen.append(os.environ.get(name))

    def make_group(_: int) -> None:
        barrier.wait()
        collective.make_nccl_group(cast("Any", None), 0, 1, SharedDeadline(1.0))

    make.Options = lambda: SimpleNamespace(config=SimpleNamespace())  # type: ignore[attr-defined]
    monkeypatch.setattr(collective.dist, "ProcessGroupNCCL", make, raising=False)
    monkeypatch.delenv(name, raising=False)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make_group, range(4)))
    assert seen == ["0"] * 4
    assert name not in os.environ


def test_damaged_slices_are_refused_naming_the_rank(slices: Any):
    writer, readers = slices
    writer.set_readers({"a": LAYOUTS})
    manifest = VERSIONS.publish(writer, 0)
    received = readers["a"].fetch_slices(manifest)
    damaged = [received[0], [bucket.copy() for bucket in received[1]]]
    damaged[1][0][5] ^= 1
    with pytest.raises(WeightsError, match=r"slices of rank 1: .* bucket 0 of 2: checksum"):
        unpack_slices(manifest, damaged)


@pytest.mark.slow
def test_a_member_that_skips_a_version_or_dies_costs_the_others_only_a_deadline(
    cluster: Broadcasting,
):
    cluster.add("a", "b", "c")
    a, b, c = cluster.readers
    assert cluster.round() == [(True, None)] * 3
    start = time.monotonic()
    outcomes = cluster.round([a, c])
    assert time.monotonic() - start < TIMEOUT_S
    assert outcomes == [(True, "weights version 1 was not sent: b did not join in time")] * 2
    # The next epoch does not include b, which uses the fallback.
    (outcome_a, outcome_b, outcome_c) = cluster.round([a, b, c])
    assert cluster.writer.send_failure is None
    assert outcome_a == outcome_c == (True, None)
    assert outcome_b == (True, "weights version 2 was not sent: b is not a member of group epoch 2")
    # Having fetched a version, b is a member again.
    assert cluster.round() == [(True, None)] * 3
    manifest = cluster.put()
    start = time.monotonic()
    b.pull(manifest, dies_at=4)
    a.pull(manifest)
    c.pull(manifest)
    assert [reader.outcome()[0] for reader in (a, c)] == [True, True]
    assert time.monotonic() - start < 2 * TIMEOUT_S
    b.process.join(10)
    assert b.process.exitcode == 1
    # The publisher has not detected the death yet: the next version waits for b.
    assert [is_right for is_right, _ in cluster.round([a, c])] == [True, True]
    assert cluster.round([a, c]) == [(True, None)] * 2


def test_an_absent_member_delays_the_next_version_only_by_the_gathering(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(transport, "MIN_BYTES_PER_S", 1e3)  # a transfer time of hours
    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=8)
    writer.set_readers({"absent": ()})
    start = time.monotonic()
    VERSIONS.publish(writer, 0)
    assert time.monotonic() - start < 1.5, "gathering members takes 2 s, in the background"
    writer.begin_version(1)  # does not refill staging buffers during a broadcast
    assert 2 <= time.monotonic() - start < 6
    assert (
        writer.send_failure
        == "weights version 0 was not sent to absent: timed out waiting for absent"
    )
    writer.close()


NO_MEMBERS = "weights version 0 was not sent: a did not join in time"


@pytest.mark.parametrize(
    ("bytes_per_s", "s_per_member", "reason"),
    [(1e9, 0.0, NO_MEMBERS), (1e6, 0.0, None), (1e9, 5.0, None)],
)
def test_the_time_for_gathering_members_grows_with_bytes_and_members(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, s_per_member: float, reason: str | None
):
    monkeypatch.setattr(collective, "READY_BYTES_PER_S", bytes_per_s)
    monkeypatch.setattr(collective, "CONNECT_S_PER_MEMBER", s_per_member)
    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=1)
    reader = CollectiveReader("a", LocalReader(), timeout_s=1)
    writer.set_readers({"a": ()})
    manifest = VERSIONS.publish(writer, 0)  # 4.8 MB
    time.sleep(0.5)  # a member may be 0.25 s late, a quarter of the timeout
    assert VERSIONS.fetch(reader, manifest)
    assert reader.fallback_reason == reason
    writer.close()
    reader.close()


def test_a_restarted_member_uses_the_fallback_for_the_version_of_its_dead_predecessor(
    cluster: Broadcasting,
):
    """A process cannot take the place of a dead process in a group; trying would wait for a
    timeout.
    """
    cluster.add("a")
    for _ in range(2):
        cluster.round()  # a new reader in the first round, a member in the second
    manifest = cluster.put()
    cluster.readers[0].pull(manifest)
    assert cluster.readers[0].outcome() == (True, None)
    cluster.readers.pop().end()
    cluster.add("a")
    start = time.monotonic()
    cluster.readers[0].pull(manifest)
    is_right, reason = cluster.readers[0].outcome()
    assert is_right and reason is not None and "another process of a" in reason
    assert time.monotonic() - start < TIMEOUT_S / 4
    for _ in range(3):  # misses one version; the next epoch has the new process
        outcome = cluster.round()
    assert outcome == [(True, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("bytes_per_s", "arrives"), [(100e6, False), (4e5, True)])
def test_a_broadcasts_deadline_grows_with_its_bytes(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, arrives: bool
):
    send = collective.BroadcastGroup.broadcast_tensor

    def broadcast_slowly(
        self: collective.BroadcastGroup, tensor: torch.Tensor, deadline: SharedDeadline
    ) -> None:
        if threading.current_thread() is not threading.main_thread():  # the sending thread
            time.sleep(1.2)
        send(self, tensor, deadline)

    monkeypatch.setattr(collective.BroadcastGroup, "broadcast_tensor", broadcast_slowly)
    monkeypatch.setattr(transport, "MIN_BYTES_PER_S", bytes_per_s)
    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=4)
    collective_reader = CollectiveReader("a", LocalReader(), timeout_s=4)
    writer.set_readers({"a": ()})
    # 4.8 MB in four buckets; with the header the five broadcasts take 6 s.
    assert VERSIONS.fetch(collective_reader, VERSIONS.publish(writer, 0))
    assert (collective_reader.fallback_reason is None) is arrives
    writer.close()
    assert (writer.send_failure is None) is arrives
    collective_reader.close()


@contextmanager
def stall_reader(timeout_s: float) -> Iterator[CollectiveWriter]:
    """Yield a writer that is broadcasting many buckets to a reader that stalls at the second."""
    stalls, can_end = threading.Event(), threading.Event()

    def stall() -> None:
        stalls.set()
        can_end.wait(60)
        raise WeightsError("stalled")

    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=timeout_s)
    reader = CollectiveReader("a", LocalReader(), timeout_s=timeout_s)
    writer.set_readers({"a": ()})
    tensors = {f"t{i}": torch.ones(250) for i in range(200)}
    with act_in_broadcast(3, stall), ThreadPoolExecutor(1) as thread:
        manifest = publish_version(tensors.items(), version=0, bucket_bytes=1000, writer=writer)
        fetching = thread.submit(reader.fetch_buckets, manifest)
        try:
            assert stalls.wait(60)
            yield writer
        finally:
            can_end.set()
            fetching.result()
            writer.close()
            reader.close()


@pytest.mark.parametrize(
    ("timeout_s", "setting", "readers", "cause"),
    [
        # 0.5 s a bucket, 100 s in all.
        (2, (transport, "MIN_BYTES_PER_S", 2e3), "a", "timed out during a broadcast"),
        (40, None, "b", "a left"),
        (
            40,
            (collective, "MAX_SEND_WAIT_S", 0.5),
            "a",
            "not finished 0.5 s after the next version was due",
        ),
    ],
)
def test_a_member_that_stalls_delays_the_next_version_by_a_buckets_deadline_at_most(
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
    setting: tuple[Any, str, float] | None,
    readers: str,
    cause: str,
):
    if setting is not None:
        monkeypatch.setattr(*setting)
    with stall_reader(timeout_s) as writer:
        start = time.monotonic()
        writer.set_readers({readers: ()})
        writer.begin_version(1)
        assert time.monotonic() - start < 12
        assert writer.send_failure == f"weights version 0 was not sent to a: {cause}"


def test_the_wait_for_a_broadcast_fits_into_a_collective_of_the_trainer():
    longest_wait_s = collective.MAX_SEND_WAIT_S + collective.ABORT_S
    assert longest_wait_s < TrainerConfig().collective_timeout_s / 4


@pytest.mark.parametrize("expected", [(1, 5), (2, 4)])
def test_a_header_of_another_version_or_epoch_is_refused(expected: tuple[int, int]):
    deadline = SharedDeadline(TIMEOUT_S)
    store = collective.serve_readers("127.0.0.1", TIMEOUT_S)
    epoch = collective.GroupEpoch(1, "127.0.0.1", store.port, ("a",))

    def exchange(rank: int, header: tuple[int, int]) -> None:
        own_store = collective.join_store(epoch, deadline) if rank else store
        group = collective.BroadcastGroup(own_store, epoch, rank, torch.device("cpu"), deadline)
        group.verify_header(header, deadline)

    with ThreadPoolExecutor(2) as threads:
        publishing, reading = (
            threads.submit(exchange, 0, (1, 4)),
            threads.submit(exchange, 1, expected),
        )
        publishing.result(TIMEOUT_S)
        text = rf"received epoch and version \(1, 4\), expected \({expected[0]}, {expected[1]}\)"
        with pytest.raises(WeightsError, match=text):
            reading.result(TIMEOUT_S)


def test_the_error_names_the_failures_of_broadcast_and_fallback():
    class Closed(LocalReader):
        def fetch_buckets(self, manifest: WeightManifest) -> list[Array]:
            raise WeightsError(f"version {manifest.version}, bucket 0: gone")

    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=8)
    writer.set_readers({"a": (), "absent": ()})
    manifest = VERSIONS.publish(writer, 0)
    collective_reader = CollectiveReader("a", Closed(), timeout_s=8)
    pattern = r"bucket 0: gone \(weights version 0 was not sent: absent did not join in time"
    with pytest.raises(WeightsError, match=pattern):
        collective_reader.fetch_buckets(manifest)
    writer.close()
