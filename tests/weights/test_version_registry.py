"""What the meeting point of publisher and readers tells, and whom it lets go first."""

import asyncio
import math

import numpy as np
import pytest

from streamrl.errors import WeightsError
from streamrl.simulator.replicas.virtual_loop import run_virtual
from streamrl.weights import WeightManifest
from streamrl.weights.broadcast_tree import BroadcastTree
from streamrl.weights.metrics import PullStats, SyncStats, weight_metrics
from streamrl.weights.version_registry import (
    FALLBACK_USED,
    ReaderState,
    WeightFault,
    WeightRegistry,
)

SEQUENCES = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, (), ())


def test_a_slow_publish_is_told_once_and_hides_no_other() -> None:
    registry = WeightRegistry(keep_versions=2)
    assert math.isnan(registry.drain_stats().publish_s)
    registry.add_manifest(manifest(0), publish_s=9.0)
    registry.add_manifest(manifest(1), publish_s=0.5)
    assert registry.drain_stats().publish_s == 9.0, "the longest of those since the last time"
    registry.add_manifest(manifest(2), publish_s=0.25)
    assert registry.drain_stats().publish_s == 0.25
    assert math.isnan(registry.drain_stats().publish_s)


def test_nodes_take_turns_and_a_node_that_failed_is_waited_for_by_nobody() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, broadcast_tree=BroadcastTree("node-0", fanout=1))
        registry.add_manifest(manifest(0))

        async def ask(node: str, held: int, fault: str = "") -> WeightManifest | None:
            state = ReaderState(held, PullStats(), WeightFault(0, fault) if fault else None, node)
            return await registry.wait_for_newer(f"reader-{node}", state, wait_s=1.0)

        assert await ask("node-1", -1) is not None
        assert await ask("node-2", -1) is None, "one at a time from one node"
        assert await ask("node-1", -1, fault="it broke") is not None
        assert await ask("node-1", 0) is None, "it has it: nothing newer comes"
        both = await asyncio.gather(ask("node-2", -1), ask("node-3", -1))
        assert all(found is not None for found in both), "two have it, and serve two"

    run_virtual(scenario())


def test_a_node_where_a_reader_failed_serves_no_others() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, broadcast_tree=BroadcastTree("node-0", fanout=1))
        registry.add_manifest(manifest(0))

        async def ask(reader: str, node: str, held: int, fault: str = "") -> WeightManifest | None:
            state = ReaderState(held, fault=WeightFault(0, fault) if fault else None, node=node)
            return await registry.wait_for_newer(reader, state, wait_s=1.0)

        assert await ask("generator-0", "node-1", -1) is not None
        assert await ask("generator-0", "node-1", 0) is None, "it has it: two nodes serve two"
        assert await ask("generator-1", "node-1", -1, fault="it broke") is not None
        assert await ask("generator-2", "node-2", -1) is None, "one pulls, from the only one left"

    run_virtual(scenario())


def test_a_way_round_is_no_fault() -> None:
    told: list[tuple[str, str, WeightFault]] = []

    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, on_fault=lambda *one: told.append(one))
        pull = PullStats(fallback_reason="it came too late")
        await registry.wait_for_newer("generator-0", ReaderState(4, pull), wait_s=0.0)
        assert registry.drain_stats().num_faults == 0

    run_virtual(scenario())
    assert told == [(FALLBACK_USED, "generator-0", WeightFault(4, "it came too late"))]


def test_skew_is_of_those_who_serve() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        registry.add_manifest(manifest(6))
        for reader, version in {"generator-0": 4, "generator-1": -1}.items():
            await registry.wait_for_newer(reader, ReaderState(version), wait_s=0.0)
        assert registry.drain_stats().max_version_lag == 2

    run_virtual(scenario())


def test_what_critics_move_counts_and_what_they_pause_does_not() -> None:
    policy = SyncStats([PullStats(1.0, 0.25, 100, 7, logprob_diff=0.5, copied_bytes=40)], 0.5, 1, 2)
    critic = SyncStats([PullStats(4.0, 3.0, 900, 9)], 2.0, 3, 1)
    found = weight_metrics(policy, [critic, SyncStats([], math.nan, 0, 0)])
    assert found == {
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


def test_what_was_copied_is_told_if_every_pull_tells_and_there_was_one() -> None:
    def told(*copied_bytes: float) -> float:
        pulls = [PullStats(copied_bytes=each) for each in copied_bytes]
        return weight_metrics(SyncStats(pulls, 0.5, 0, 0))["weights/copied_bytes"]

    assert told(0) == 0 and told(30, 12) == 42
    assert math.isnan(told()) and math.isnan(told(30, math.nan))


def test_who_could_not_verify_a_version_gets_the_one_that_is_sent_again() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        for version in (3, 4, 4):
            registry.add_manifest(manifest(version))
        first, again = [
            await registry.wait_for_newer("generator-0", ReaderState(held), wait_s=0.0)
            for held in (3, 4)
        ]
        assert first is not None and first.version == 4
        assert again is None, "who holds it does not hear of it"
        with pytest.raises(WeightsError, match="version 3 was published after 4"):
            registry.add_manifest(manifest(3))

    run_virtual(scenario())
