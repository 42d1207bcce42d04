"""Followers of the weights: pulls, retries, refused versions, logprob checks."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.errors import (
    LogprobCheckError,
    VersionNotStoredError,
    VersionSupersededError,
    WeightsError,
)
from streamrl.messages import Array
from streamrl.pipeline import (
    FOLLOW_WAIT_S,
    PULL_ATTEMPTS,
    exclude_unverified,
    find_newest_version,
    follow_weights,
)
from streamrl.stream.device_lease import DedicatedDeviceLease, DeviceArbiter, SharedDeviceLease
from streamrl.stream.protocols import StageContext
from streamrl.stream.weight_publisher import WeightPublisher
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import ServedVersion, WeightLoadStats, WeightManifest
from streamrl.weights.versions import (
    LOAD_REFUSED,
    FetchedWeights,
    FollowerState,
    LogprobCheck,
    WeightFault,
    WeightRegistry,
)
from tests.stream.test_weight_publisher import Source
from tests.virtual_time import in_virtual_time

SEQUENCES = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]


class Engine:
    """Engine that serves versions and computes the same logprob for every token."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.served: list[int] = []
        self.logprob = logprob

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        await asyncio.sleep(0.5)
        self.served.append(version)
        return WeightLoadStats(pause_s=0.25, num_interrupted=7, copied_bytes=30)

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array]:
        await asyncio.sleep(1.0)
        return [np.full(len(ids), self.logprob, np.float32) for ids in sequences]


class Channel:
    """Channel on a local registry; the first `faults[version]` fetches of a version fail."""

    def __init__(self, registry: WeightRegistry, faults: Mapping[int, int] | None = None) -> None:
        self.registry = registry
        self.faults = dict(faults or {})
        self.tries: list[tuple[float, int]] = []

    async def wait_for_newer(self, held: FollowerState, *, wait_s: float) -> WeightManifest | None:
        return await self.registry.wait_for_newer("generator-0", held, wait_s=wait_s)

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        self.tries.append((asyncio.get_running_loop().time(), manifest.version))
        if self.faults.get(manifest.version, 0):
            self.faults[manifest.version] -= 1
            raise WeightsError(f"version {manifest.version}: checksum is wrong")
        return FetchedWeights({}, num_bytes=1000)


class Unstored(Channel):
    """Channel whose source sent a version to other followers only, until `is_stored`."""

    is_stored = False

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        if not self.is_stored:
            raise VersionNotStoredError(f"version {manifest.version} went to its readers only")
        return await super().fetch_weights(manifest)


class Resident(Channel):
    """Channel whose source overwrites versions up to `overwritten`."""

    def __init__(self, registry: WeightRegistry) -> None:
        super().__init__(registry)
        self.overwritten = -1

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        if manifest.version <= self.overwritten:
            self.tries.append((asyncio.get_running_loop().time(), manifest.version))
            raise VersionSupersededError(f"version {manifest.version} is gone")
        return await super().fetch_weights(manifest)


def stage() -> StageContext:
    # These tests use no queue.
    return StageContext("generate", None, DedicatedDeviceLease(), SpanRecorder("generator-0"))  # type: ignore[arg-type]


def manifest(version: int, probe: LogprobCheck | None = None) -> WeightManifest:
    return WeightManifest(version, (), (), probe)


@in_virtual_time
async def test_unverifiable_version_is_not_loaded_and_retried():
    faults: list[tuple[str, str, WeightFault]] = []
    registry = WeightRegistry(
        keep_versions=2, on_fault=lambda *fault_args: faults.append(fault_args)
    )
    engine, served = Engine(), ServedVersion("generator-0")
    channel = Channel(registry, {1: 3})
    following = asyncio.create_task(follow_weights(stage(), engine, channel, served))
    registry.add_manifest(manifest(0))
    await served.wait_for_version(0)
    registry.add_manifest(manifest(1))
    await asyncio.sleep(0.35)
    assert engine.served == [0], "the old version is still served"
    await served.wait_for_version(1)
    assert engine.served == [0, 1]
    await asyncio.sleep(2.0)
    following.cancel()
    fault = WeightFault(1, "version 1: checksum is wrong")
    assert faults == [(LOAD_REFUSED, "generator-0", fault)] * 3
    times = [at for at, version in channel.tries if version == 1]
    pauses = [round(b - a, 3) for a, b in itertools.pairwise(times)]
    assert pauses == sorted(pauses) and pauses[0] > 0, "the retry delay grows"
    assert registry.drain_stats().num_faults == 3


@pytest.mark.parametrize(("later_s", "max_pulls"), [(0.03, 3), (60.0, 250)])
@in_virtual_time
async def test_superseded_version_is_skipped_for_the_next(later_s: float, max_pulls: int):
    registry, clock = WeightRegistry(keep_versions=2), asyncio.get_running_loop()
    engine, served, channel = Engine(), ServedVersion("generator-0"), Resident(registry)
    channel.overwritten = 0
    following = asyncio.create_task(follow_weights(stage(), engine, channel, served))
    registry.add_manifest(manifest(0))
    await asyncio.sleep(later_s)
    offered_at = clock.time()
    registry.add_manifest(manifest(1))
    await served.wait_for_version(1)
    following.cancel()
    assert engine.served == [1]
    # A load takes 0.5 s. The polling interval grows while no newer version appears.
    assert clock.time() - offered_at <= 0.5 + max(0.02, min(later_s, 0.25))
    assert 1 < len(channel.tries) - 1 <= max_pulls


@in_virtual_time
async def test_a_version_that_was_not_stored_costs_no_follower():
    """The copy of a large model may take minutes; until then the follower asks more rarely."""
    refused: list[float] = []
    registry = WeightRegistry(
        keep_versions=2,
        on_fault=lambda *fault: refused.append(asyncio.get_running_loop().time()),
    )
    engine, served = Engine(), ServedVersion("generator-0")
    channel = Unstored(registry)
    following = asyncio.create_task(follow_weights(stage(), engine, channel, served))
    registry.add_manifest(manifest(0))
    await asyncio.sleep(300)
    assert not following.done() and served.version == -1
    assert refused[1] < 2 and len(refused) < 100
    channel.is_stored = True
    registry.add_manifest(manifest(0))
    async with asyncio.timeout(6):
        await served.wait_for_version(0)
    following.cancel()


@in_virtual_time
async def test_follower_gives_up_after_max_pull_attempts():
    registry = WeightRegistry(keep_versions=2)
    engine, served = Engine(), ServedVersion("generator-0")
    channel = Channel(registry, {0: 100})
    registry.add_manifest(manifest(0))
    with pytest.raises(WeightsError, match="version 0: checksum is wrong"):
        await follow_weights(stage(), engine, channel, served)
    assert len(channel.tries) == PULL_ATTEMPTS
    assert engine.served == [] and served.version == -1


@in_virtual_time
async def test_older_version_is_refused():
    class Backwards(Channel):
        async def wait_for_newer(
            self, held: FollowerState, *, wait_s: float
        ) -> WeightManifest | None:
            return manifest(5 if held.version < 0 else 4)

    registry = WeightRegistry(keep_versions=2)
    engine, served = Engine(), ServedVersion("generator-0")
    with pytest.raises(WeightsError, match="version 4 was offered, but 5 is served already"):
        await follow_weights(stage(), engine, Backwards(registry), served)
    assert engine.served == [5]


@in_virtual_time
async def test_follower_with_different_logprobs_serves_nothing_and_fails():
    registry = WeightRegistry(keep_versions=2)
    engine, served = Engine(logprob=-3.0), ServedVersion("generator-0")
    logprobs = [np.full(len(ids), -1.0, np.float32) for ids in SEQUENCES]
    registry.add_manifest(manifest(0, LogprobCheck(SEQUENCES, logprobs, limit=0.5)))
    with pytest.raises(LogprobCheckError, match=r"generator-0, with version 0, .* by 2 nats on"):
        await follow_weights(stage(), engine, Channel(registry), served)
    assert served.version == -1, "rollouts of the version stay uncommitted"


def test_newest_version_of_columns():
    assert find_newest_version({"policy_version": np.array([-1, 3, 4, -1, 3], np.int32)}) == 4
    assert find_newest_version({"greedy_ids": np.array([1], np.int32)}) == -1


@in_virtual_time
async def test_partial_rollouts_of_an_unverified_version_are_excluded():
    served = ServedVersion("generator-0", version=3)

    async def read_partials() -> Mapping[str, Mapping[str, Array]]:
        return {
            uid: {"policy_version": np.array([-1, *versions], np.int32)}
            for uid, versions in {"old": [2, 3], "new": [3, 4]}.items()
        }

    assert (await exclude_unverified(read_partials, served)()).keys() == {"old"}
    served.advance_to(4)
    assert (await exclude_unverified(read_partials, served)()).keys() == {"old", "new"}


@in_virtual_time
async def test_fault_is_reported_once():
    faults: list[tuple[str, str, WeightFault]] = []

    class Once(Channel):
        """Channel that offers a version only once."""

        async def wait_for_newer(
            self, held: FollowerState, *, wait_s: float
        ) -> WeightManifest | None:
            await self.registry.wait_for_newer("generator-0", held, wait_s=0.0)
            await asyncio.sleep(wait_s)
            return None if self.tries else manifest(7)

    registry = WeightRegistry(
        keep_versions=2, on_fault=lambda *fault_args: faults.append(fault_args)
    )
    channel, served = Once(registry, {7: 1}), ServedVersion("generator-0")
    following = asyncio.create_task(follow_weights(stage(), Engine(), channel, served))
    await asyncio.sleep(5 * FOLLOW_WAIT_S)
    following.cancel()
    assert registry.drain_stats().num_faults == 1
    assert faults == [(LOAD_REFUSED, "generator-0", WeightFault(7, "version 7: checksum is wrong"))]


@in_virtual_time
async def test_publish_and_load_hold_the_device_lease():
    clock = asyncio.get_running_loop().time
    arbiter = DeviceArbiter(timeout_s=100.0)
    trainer, generator = (
        SharedDeviceLease(arbiter, "trainer"),
        SharedDeviceLease(arbiter, "generator-0"),
    )
    registry, served = WeightRegistry(keep_versions=2), ServedVersion("generator-0")
    publishing = WeightPublisher({"policy": Source(2.0)}, {"policy": registry}, lease=trainer)
    context = replace(stage(), device_lease=generator)
    follow = follow_weights(context, Engine(), Channel(registry), served)
    async with generator.hold("generate"):
        await publishing.begin_publish(0)
        await asyncio.sleep(10.0)
        assert registry.version == -1, "the generator holds the lease"
    await publishing.wait_until_published()
    assert clock() == 12.0
    async with trainer.hold("train"):
        following = asyncio.create_task(follow)
        await asyncio.sleep(10.0)
        assert served.version == -1, "the trainer holds the lease"
    await served.wait_for_version(0)
    assert clock() == 22.5
    following.cancel()
