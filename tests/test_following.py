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
from tests.fakes import LocalChannel
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


class Channel(LocalChannel):
    """Channel on a local registry, whose faults are recorded with their times.

    faults: number of the first fetches of a version that fail, by version.
    overwritten: newest version that the source has overwritten.
    is_stored: false if the source sent its versions to other followers only.
    """

    def __init__(self, faults: Mapping[int, int] | None = None) -> None:
        self.reported: list[tuple[float, str, str, WeightFault]] = []
        self.registry = WeightRegistry(keep_versions=2, on_fault=self._note_fault)
        super().__init__(self.registry, "generator-0")
        self.faults = dict(faults or {})
        self.overwritten, self.is_stored = -1, True
        self.tries: list[tuple[float, int]] = []

    def _note_fault(self, kind: str, reader: str, fault: WeightFault) -> None:
        self.reported.append((asyncio.get_running_loop().time(), kind, reader, fault))

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        version = manifest.version
        self.tries.append((asyncio.get_running_loop().time(), version))
        if not self.is_stored:
            raise VersionNotStoredError(f"version {version} went to its readers only")
        if version <= self.overwritten:
            raise VersionSupersededError(f"version {version} is gone")
        if self.faults.get(version, 0):
            self.faults[version] -= 1
            raise WeightsError(f"version {version}: checksum is wrong")
        return FetchedWeights({}, num_bytes=1000)


class Follower:
    """Engine and served version of a follower, and the loop that it runs."""

    def __init__(self, channel: Channel, logprob: float = -1.0) -> None:
        self.engine, self.served = Engine(logprob), ServedVersion("generator-0")
        self.loop = follow_weights(stage(), self.engine, channel, self.served)


def stage() -> StageContext:
    # These tests use no queue.
    return StageContext("generate", None, DedicatedDeviceLease(), SpanRecorder("generator-0"))  # type: ignore[arg-type]


def manifest(version: int, probe: LogprobCheck | None = None) -> WeightManifest:
    return WeightManifest(version, (), (), probe)


@in_virtual_time
async def test_unverifiable_version_is_not_loaded_and_retried():
    channel = Channel({1: 3})
    follower = Follower(channel)
    following = asyncio.create_task(follower.loop)
    channel.registry.add_manifest(manifest(0))
    await follower.served.wait_for_version(0)
    channel.registry.add_manifest(manifest(1))
    await asyncio.sleep(0.35)
    assert follower.engine.served == [0], "the old version is still served"
    await follower.served.wait_for_version(1)
    assert follower.engine.served == [0, 1]
    await asyncio.sleep(2.0)
    following.cancel()
    fault = WeightFault(1, "version 1: checksum is wrong")
    assert [facts for _, *facts in channel.reported] == [[LOAD_REFUSED, "generator-0", fault]] * 3
    times = [at for at, version in channel.tries if version == 1]
    pauses = [round(b - a, 3) for a, b in itertools.pairwise(times)]
    assert pauses == sorted(pauses) and pauses[0] > 0, "the retry delay grows"
    assert channel.registry.drain_stats().num_faults == 3


@pytest.mark.parametrize(("later_s", "max_pulls"), [(0.03, 3), (60.0, 250)])
@in_virtual_time
async def test_superseded_version_is_skipped_for_the_next(later_s: float, max_pulls: int):
    channel, clock = Channel(), asyncio.get_running_loop()
    channel.overwritten = 0
    follower = Follower(channel)
    following = asyncio.create_task(follower.loop)
    channel.registry.add_manifest(manifest(0))
    await asyncio.sleep(later_s)
    offered_at = clock.time()
    channel.registry.add_manifest(manifest(1))
    await follower.served.wait_for_version(1)
    following.cancel()
    assert follower.engine.served == [1]
    # A load takes 0.5 s. The polling interval grows while no newer version appears.
    assert clock.time() - offered_at <= 0.5 + max(0.02, min(later_s, 0.25))
    assert 1 < len(channel.tries) - 1 <= max_pulls


@in_virtual_time
async def test_a_version_that_was_not_stored_costs_no_follower():
    """The copy of a large model may take minutes; until then the follower asks more rarely."""
    channel = Channel()
    channel.is_stored = False
    follower = Follower(channel)
    following = asyncio.create_task(follower.loop)
    channel.registry.add_manifest(manifest(0))
    await asyncio.sleep(300)
    assert not following.done() and follower.served.version == -1
    assert channel.reported[1][0] < 2 and len(channel.reported) < 100
    channel.is_stored = True
    channel.registry.add_manifest(manifest(0))
    async with asyncio.timeout(6):
        await follower.served.wait_for_version(0)
    following.cancel()


@in_virtual_time
async def test_follower_gives_up_after_max_pull_attempts():
    channel = Channel({0: 100})
    follower = Follower(channel)
    channel.registry.add_manifest(manifest(0))
    with pytest.raises(WeightsError, match="version 0: checksum is wrong"):
        await follower.loop
    assert len(channel.tries) == PULL_ATTEMPTS
    assert follower.engine.served == [] and follower.served.version == -1


@in_virtual_time
async def test_older_version_is_refused():
    class Backwards(Channel):
        async def wait_for_newer(
            self, held: FollowerState, *, wait_s: float
        ) -> WeightManifest | None:
            return manifest(5 if held.version < 0 else 4)

    follower = Follower(Backwards())
    with pytest.raises(WeightsError, match="version 4 was offered, but 5 is served already"):
        await follower.loop
    assert follower.engine.served == [5]


@in_virtual_time
async def test_follower_with_different_logprobs_serves_nothing_and_fails():
    channel = Channel()
    follower = Follower(channel, logprob=-3.0)
    logprobs = [np.full(len(ids), -1.0, np.float32) for ids in SEQUENCES]
    channel.registry.add_manifest(manifest(0, LogprobCheck(SEQUENCES, logprobs, limit=0.5)))
    with pytest.raises(LogprobCheckError, match=r"generator-0, with version 0, .* by 2 nats on"):
        await follower.loop
    assert follower.served.version == -1, "rollouts of the version stay uncommitted"


@in_virtual_time
async def test_fault_is_reported_once():
    class Once(Channel):
        """Channel that offers a version only once."""

        async def wait_for_newer(
            self, held: FollowerState, *, wait_s: float
        ) -> WeightManifest | None:
            await self.registry.wait_for_newer("generator-0", held, wait_s=0.0)
            await asyncio.sleep(wait_s)
            return None if self.tries else manifest(7)

    channel = Once({7: 1})
    following = asyncio.create_task(Follower(channel).loop)
    await asyncio.sleep(5 * FOLLOW_WAIT_S)
    following.cancel()
    assert channel.registry.drain_stats().num_faults == 1
    fault = WeightFault(7, "version 7: checksum is wrong")
    assert [facts for _, *facts in channel.reported] == [[LOAD_REFUSED, "generator-0", fault]]


@in_virtual_time
async def test_publish_and_load_hold_the_device_lease():
    clock = asyncio.get_running_loop().time
    arbiter = DeviceArbiter(timeout_s=100.0)
    trainer, generator = (
        SharedDeviceLease(arbiter, "trainer"),
        SharedDeviceLease(arbiter, "generator-0"),
    )
    channel, served = Channel(), ServedVersion("generator-0")
    registry = channel.registry
    publishing = WeightPublisher({"policy": Source(2.0)}, {"policy": registry}, lease=trainer)
    context = replace(stage(), device_lease=generator)
    follow = follow_weights(context, Engine(), channel, served)
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
