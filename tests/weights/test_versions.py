"""Versions: statistics, faults and the order of pulls; waits for the served version."""

import asyncio
import gc
import math
import weakref

import numpy as np
import pytest

from streamrl.errors import WeightsError
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.weights import ServedVersion, WeightManifest
from streamrl.weights.broadcast_tree import BroadcastTree
from streamrl.weights.manifest import WeightBucket
from streamrl.weights.versions import (
    FALLBACK_USED,
    NOT_LOADED,
    PullStats,
    ReaderState,
    SyncStats,
    WeightFault,
    WeightRegistry,
    compute_weight_metrics,
)
from tests.operations import count_lines

SEQUENCES = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]


def make_manifest(version: int) -> WeightManifest:
    return WeightManifest(version, (), ())


def test_the_slowest_publish_is_reported_once():
    registry = WeightRegistry(keep_versions=2)
    assert math.isnan(registry.drain_stats().publish_s)
    registry.add_manifest(make_manifest(0), publish_s=9.0)
    registry.add_manifest(make_manifest(1), publish_s=0.5)
    assert registry.drain_stats().publish_s == 9.0, "the longest since the last call"
    registry.add_manifest(make_manifest(2), publish_s=0.25)
    assert registry.drain_stats().publish_s == 0.25
    assert math.isnan(registry.drain_stats().publish_s)


class Handle:
    """Bucket of a version, which lives as long as somebody refers to it, as an object of Ray."""


def test_the_last_versions_stay_for_readers_in_the_middle_of_a_pull():
    registry = WeightRegistry(keep_versions=2)
    buckets: list[weakref.ref[Handle]] = []

    def publish(version: int) -> None:
        handle = Handle()
        buckets.append(weakref.ref(handle))
        registry.add_manifest(WeightManifest(version, (WeightBucket((), 0, ""),), (handle,)))

    def list_kept() -> list[int]:
        gc.collect()
        return [number for number, bucket in enumerate(buckets) if bucket() is not None]

    publish(0)
    publish(1)
    assert list_kept() == [0, 1]
    publish(2)
    assert list_kept() == [1, 2]
    publish(2)
    assert list_kept() == [1, 3], "a version published again replaces itself, not the one before"


def test_nodes_pull_in_turns_and_a_failed_node_is_skipped():
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, broadcast_tree=BroadcastTree("node-0", fanout=1))
        registry.add_manifest(make_manifest(0))

        async def ask(node: str, version: int, fault: str = "") -> WeightManifest | None:
            state = ReaderState(
                version, PullStats(), WeightFault(0, fault) if fault else None, node
            )
            return await registry.wait_for_newer(f"reader-{node}", state, wait_s=1.0)

        assert await ask("node-1", -1) is not None
        assert await ask("node-2", -1) is None, "a node serves one pull at a time (fanout=1)"
        assert await ask("node-1", -1, fault="connection lost") is not None
        assert await ask("node-1", 0) is None, "node-1 has version 0; no newer version exists"
        responses = await asyncio.gather(ask("node-2", -1), ask("node-3", -1))
        assert all(response is not None for response in responses), (
            "two ready nodes serve a pull each"
        )

    run_virtual(scenario())


def test_a_node_with_a_failed_reader_does_not_serve_others():
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, broadcast_tree=BroadcastTree("node-0", fanout=1))
        registry.add_manifest(make_manifest(0))

        async def ask(
            reader: str, node: str, version: int, fault: str = ""
        ) -> WeightManifest | None:
            state = ReaderState(version, fault=WeightFault(0, fault) if fault else None, node=node)
            return await registry.wait_for_newer(reader, state, wait_s=1.0)

        assert await ask("generator-0", "node-1", -1) is not None
        assert await ask("generator-0", "node-1", 0) is None, (
            "node-1 has version 0: two nodes serve"
        )
        assert await ask("generator-1", "node-1", -1, fault="connection lost") is not None
        assert await ask("generator-2", "node-2", -1) is None, "node-0, the only one, serves node-1"

    run_virtual(scenario())


def test_fallbacks_and_engine_warnings_are_reported_without_being_faults():
    reported: list[tuple[str, str, WeightFault]] = []

    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, on_fault=lambda *args: reported.append(args))
        warnings = ("FusedMoE: Failed to load weights",)
        pull = PullStats(fallback_reason="the broadcast came too late", warnings=warnings)
        await registry.wait_for_newer("generator-0", ReaderState(4, pull), wait_s=0.0)
        assert registry.drain_stats().num_faults == 0

    run_virtual(scenario())
    assert reported == [
        (FALLBACK_USED, "generator-0", WeightFault(4, "the broadcast came too late")),
        (NOT_LOADED, "generator-0", WeightFault(4, "FusedMoE: Failed to load weights")),
    ]


def test_skew_counts_only_readers_with_a_version():
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        registry.add_manifest(make_manifest(6))
        for reader, version in {"generator-0": 4, "generator-1": -1}.items():
            await registry.wait_for_newer(reader, ReaderState(version), wait_s=0.0)
        assert registry.drain_stats().max_version_lag == 2

    run_virtual(scenario())


def test_critics_count_for_bytes_but_not_for_pauses():
    policy = SyncStats([PullStats(1.0, 0.25, 100, 7, logprob_diff=0.5, copied_bytes=40)], 0.5, 1, 2)
    critic = SyncStats([PullStats(4.0, 3.0, 900, 9)], 2.0, 3, 1)
    metrics = compute_weight_metrics(policy, [critic, SyncStats([], math.nan, 0, 0)])
    assert metrics == {
        "weights/skew_max": 3,
        "weights/publish_s": 2.0,
        "weights/pull_s": 4.0,
        "weights/pause_s": 0.25,
        "weights/bytes": 1000,
        "weights/copied_bytes": 40,
        "weights/bytes_per_s": 200.0,
        "weights/interrupted": 7,
        "weights/probe_diff": 0.5,
        "weights/faults": 3,
    }


def test_a_reader_that_failed_verification_gets_the_republished_version():
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        for version in (3, 4, 4):
            registry.add_manifest(make_manifest(version))
        first, republished = [
            await registry.wait_for_newer("generator-0", ReaderState(number), wait_s=0.0)
            for number in (3, 4)
        ]
        assert first is not None and first.version == 4
        assert republished is None, "a reader that serves the version gets nothing"
        with pytest.raises(WeightsError, match="version 3 was published after 4"):
            registry.add_manifest(make_manifest(3))

    run_virtual(scenario())


async def test_waiters_resume_when_their_version_is_served():
    served = ServedVersion("generator 2")
    waiting = [asyncio.create_task(served.wait_for_version(v)) for v in (0, 1, 3)]
    await asyncio.sleep(0)
    served.advance_to(0)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False, False]
    served.advance_to(2)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, True, False]
    served.advance_to(3)
    assert await asyncio.gather(*waiting) == [0, 2, 3]


async def test_a_model_that_skips_versions_waits_only_for_the_due_version():
    served = ServedVersion(
        "reference-0", version=3, resolve_due_version=lambda version: version - version % 4
    )
    assert await served.wait_for_version(3) == 3
    waiting = asyncio.create_task(served.wait_for_version(6))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    served.advance_to(4)
    assert await waiting == 4


@pytest.mark.parametrize("version", [3, 2, -1])
async def test_a_version_never_goes_backwards(version: int):
    served = ServedVersion("generator 2", version=3)
    with pytest.raises(WeightsError, match=f"generator 2 holds version 3: .* version {version}"):
        served.advance_to(version)
    assert served.version == 3


def test_a_node_waits_for_its_turn_without_asking_again_and_again():
    async def count(nodes: int) -> float:
        registry = WeightRegistry(keep_versions=2, broadcast_tree=BroadcastTree("node-0"))

        async def follow(node: str) -> None:
            reader = f"generator-{node}"
            assert await registry.wait_for_newer(reader, ReaderState(-1, node=node), wait_s=900.0)
            await asyncio.sleep(5.0)
            await registry.wait_for_newer(reader, ReaderState(0, node=node), wait_s=0.0)

        followers = [asyncio.create_task(follow(f"node-{i + 1}")) for i in range(nodes)]
        await asyncio.sleep(1.0)
        with count_lines() as counted:
            registry.add_manifest(make_manifest(0))
            await asyncio.gather(*followers)
        return counted.lines / nodes

    few, many = run_virtual(count(8)), run_virtual(count(128))
    assert many <= 2 * few, f"{few} lines per node with 8 nodes, {many} with 128"


def test_a_waiting_node_pulls_once_the_pull_before_it_is_past_its_deadline():
    async def scenario() -> None:
        tree = BroadcastTree("node-0", fanout=1, deadline_s=60.0)
        registry = WeightRegistry(keep_versions=2, broadcast_tree=tree)
        registry.add_manifest(make_manifest(0))
        for node in ("node-1", "node-2"):
            state = ReaderState(-1, node=node)
            assert await registry.wait_for_newer(f"reader-{node}", state, wait_s=100.0)
        assert asyncio.get_running_loop().time() == pytest.approx(60.0)

    run_virtual(scenario())


def test_a_reader_that_was_removed_takes_no_turn():
    async def scenario() -> None:
        tree = BroadcastTree("node-0", fanout=1)
        registry = WeightRegistry(keep_versions=2, broadcast_tree=tree)
        dead = asyncio.create_task(
            registry.wait_for_newer("dead", ReaderState(-1, node="node-1"), wait_s=20.0)
        )
        await asyncio.sleep(1.0)
        registry.remove_reader("dead")
        registry.add_manifest(make_manifest(0))
        assert await dead is None
        state = ReaderState(-1, node="node-2")
        assert await registry.wait_for_newer("alive", state, wait_s=1.0)

    run_virtual(scenario())
