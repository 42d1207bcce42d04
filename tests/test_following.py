"""Following the weights: what is taken up, what is refused, and what nobody gets to see."""

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.dataflow import MOVED
from streamrl.errors import ProbeError, WeightsError
from streamrl.faces import Fetched, Stage
from streamrl.lease import Arbiter, FreeLease, SharedLease
from streamrl.messages import Array
from streamrl.pipeline import PULL_ATTEMPTS, follow_weights, newest_version, verified
from streamrl.publishing import PUBLISH_ATTEMPTS, Publishing
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import HeldVersion, Loaded, WeightManifest
from streamrl.weights.figures import Pull, Traffic, weight_metrics
from streamrl.weights.probe import Probe, probe_sequences
from streamrl.weights.registry import DETOUR, REFUSED, Fault, ReaderState, WeightRegistry
from streamrl.weights.spread import Spread
from tests.virtual_clock import run_virtual

SEQUENCES = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]


class Engine:
    """Serves versions; says of every token of a sequence that its logprob is `logprob`."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.served: list[int] = []
        self.logprob = logprob

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> Loaded:
        await asyncio.sleep(0.5)
        self.served.append(version)
        return Loaded(pause_s=0.25, interrupted=7)

    async def probe(self, sequences: Sequence[Array]) -> Sequence[Array]:
        await asyncio.sleep(1.0)
        return [np.full(len(ids), self.logprob, np.float32) for ids in sequences]


class Channel:
    """A registry from nearby, whose versions are broken as often as `faults` says."""

    def __init__(self, registry: WeightRegistry, faults: Mapping[int, int] | None = None) -> None:
        self.registry = registry
        self.faults = dict(faults or {})
        self.tries: list[tuple[float, int]] = []

    async def newest(self, held: ReaderState, *, wait_s: float) -> WeightManifest | None:
        return await self.registry.newest("generator-0", held, wait_s=wait_s)

    async def fetch(self, manifest: WeightManifest) -> Fetched:
        self.tries.append((asyncio.get_running_loop().time(), manifest.version))
        if self.faults.get(manifest.version, 0):
            self.faults[manifest.version] -= 1
            raise WeightsError(f"version {manifest.version}: checksum is wrong")
        return Fetched({}, num_bytes=1000)


def stage() -> Stage:
    # Nothing is taken from a queue here.
    return Stage("generate", None, FreeLease(), SpanRecorder("generator-0"))  # type: ignore[arg-type]


def manifest(version: int, probe: Probe | None = None) -> WeightManifest:
    return WeightManifest(version, (), (), probe)


def test_a_version_that_cannot_be_verified_is_not_taken_and_tried_again() -> None:
    told: list[tuple[str, str, Fault]] = []

    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, on_trouble=lambda *one: told.append(one))
        engine, held = Engine(), HeldVersion("generator-0")
        channel = Channel(registry, {1: 3})
        following = asyncio.create_task(follow_weights(stage(), engine, channel, held))
        registry.offer(manifest(0))
        await held.at_least(0)
        registry.offer(manifest(1))
        await asyncio.sleep(0.35)
        assert engine.served == [0], "the old one is served on"
        await held.at_least(1)
        assert engine.served == [0, 1]
        await asyncio.sleep(2.0)
        following.cancel()
        fault = Fault(1, "version 1: checksum is wrong")
        assert told == [(REFUSED, "generator-0", fault)] * 3
        times = [at for at, version in channel.tries if version == 1]
        pauses = [round(b - a, 3) for a, b in itertools.pairwise(times)]
        assert pauses == sorted(pauses) and pauses[0] > 0, "it waits longer each time"
        assert registry.drain().num_faults == 3

    run_virtual(scenario())


def test_a_newer_version_takes_the_place_of_one_that_is_broken() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        engine, held = Engine(), HeldVersion("generator-0")
        channel = Channel(registry, {0: PULL_ATTEMPTS - 1})
        following = asyncio.create_task(follow_weights(stage(), engine, channel, held))
        registry.offer(manifest(0))
        await asyncio.sleep(0.1)
        registry.offer(manifest(1))
        await held.at_least(1)
        following.cancel()
        assert engine.served == [1]

    run_virtual(scenario())


def test_who_can_take_up_nothing_gives_up_after_so_many_tries() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        engine, held = Engine(), HeldVersion("generator-0")
        channel = Channel(registry, {0: 100})
        registry.offer(manifest(0))
        with pytest.raises(WeightsError, match="version 0: checksum is wrong"):
            await follow_weights(stage(), engine, channel, held)
        assert len(channel.tries) == PULL_ATTEMPTS
        assert engine.served == [] and held.version == -1

    run_virtual(scenario())


def test_an_older_version_is_refused() -> None:
    class Backwards(Channel):
        async def newest(self, held: ReaderState, *, wait_s: float) -> WeightManifest | None:
            return manifest(5 if held.version < 0 else 4)

    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        engine, held = Engine(), HeldVersion("generator-0")
        with pytest.raises(WeightsError, match="version 4 was offered, and 5 is held already"):
            await follow_weights(stage(), engine, Backwards(registry), held)
        assert engine.served == [5]

    run_virtual(scenario())


def test_what_a_pull_took_is_reported_once() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        engine, held = Engine(), HeldVersion("generator-0")
        logprobs = [np.full(len(ids), -1.25, np.float32) for ids in SEQUENCES]
        probe = Probe(SEQUENCES, logprobs, limit=0.5)
        following = asyncio.create_task(follow_weights(stage(), engine, Channel(registry), held))
        registry.offer(manifest(0, probe), publish_s=0.125)
        await held.at_least(0)
        await asyncio.sleep(0.01)
        found = weight_metrics(registry.drain())
        assert found["weights/publish_s"] == 0.125
        assert found["weights/pause_s"] == 0.25
        assert found["weights/bytes"] == 1000
        assert found["weights/interrupted"] == 7
        assert found["weights/probe_diff"] == 0.25
        assert found["weights/skew_max"] == 0
        await asyncio.sleep(5.0)
        following.cancel()
        again = weight_metrics(registry.drain())
        assert again["weights/bytes"] == again["weights/interrupted"] == 0
        assert math.isnan(again["weights/probe_diff"])
        assert math.isnan(again["weights/publish_s"])

    run_virtual(scenario())


def test_who_differs_from_the_trainer_serves_no_version_and_ends() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        engine, held = Engine(logprob=-3.0), HeldVersion("generator-0")
        logprobs = [np.full(len(ids), -1.0, np.float32) for ids in SEQUENCES]
        registry.offer(manifest(0, Probe(SEQUENCES, logprobs, limit=0.5)))
        with pytest.raises(ProbeError, match=r"generator-0, with version 0, .* by up to 2, more"):
            await follow_weights(stage(), engine, Channel(registry), held)
        assert held.version == -1, "what it has sampled since then leaves it never"

    run_virtual(scenario())


def test_the_first_token_of_a_probe_has_no_say_and_nan_never_passes() -> None:
    logprobs = [np.array([0, -1, -2], np.float32)]
    probe = Probe([np.array([3, 1, 4], np.int32)], logprobs, limit=0.1)
    assert probe.check([np.array([9, -1, -2.0625], np.float32)], "it") == 0.0625
    with pytest.raises(ProbeError, match="by up to nan"):
        probe.check([np.array([0, math.nan, -2], np.float32)], "it")


def test_nan_in_any_sequence_of_a_probe_never_passes() -> None:
    logprobs = [np.array([0, -1], np.float32)] * 2
    probe = Probe([np.array([3, 1], np.int32)] * 2, logprobs, limit=0.1)
    with pytest.raises(ProbeError, match="by up to nan"):
        probe.check([logprobs[0], np.array([0, math.nan], np.float32)], "it")


def test_a_probe_for_sequences_of_two_has_nothing_to_compare_and_passes() -> None:
    sequences = probe_sequences(vocab_size=50, max_length=2)
    assert {len(ids) for ids in sequences} == {1}
    logprobs = [np.zeros(1, np.float32)] * len(sequences)
    assert Probe(sequences, logprobs, limit=0.1).check(logprobs, "it") == 0.0


def test_a_slow_publish_is_told_once_and_hides_no_other() -> None:
    registry = WeightRegistry(keep_versions=2)
    assert math.isnan(registry.drain().publish_s)
    registry.offer(manifest(0), publish_s=9.0)
    registry.offer(manifest(1), publish_s=0.5)
    assert registry.drain().publish_s == 9.0, "the longest of those since the last time"
    registry.offer(manifest(2), publish_s=0.25)
    assert registry.drain().publish_s == 0.25
    assert math.isnan(registry.drain().publish_s)


def test_a_probe_is_the_same_for_every_version_and_fits_the_model() -> None:
    first = probe_sequences(vocab_size=50, max_length=20)
    again = probe_sequences(vocab_size=50, max_length=20)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert {len(ids) for ids in first} == {19}
    assert all(ids.min() >= 0 and ids.max() < 50 for ids in first)


def test_the_newest_version_among_tokens() -> None:
    assert newest_version({"policy_version": np.array([-1, 3, 4, -1, 3], np.int32)}) == 4
    assert newest_version({"greedy_ids": np.array([1], np.int32)}) == -1


def test_what_is_begun_under_a_version_that_is_not_verified_is_not_told() -> None:
    held = HeldVersion("generator-0", version=3)

    async def begun() -> Mapping[str, Mapping[str, Array]]:
        return {
            uid: {"policy_version": np.array([-1, *versions], np.int32)}
            for uid, versions in {"old": [2, 3], "new": [3, 4]}.items()
        }

    async def scenario() -> None:
        assert (await verified(begun, held)()).keys() == {"old"}
        held.advance(4)
        assert (await verified(begun, held)()).keys() == {"old", "new"}

    run_virtual(scenario())


def test_nodes_take_turns_and_a_node_that_failed_is_waited_for_by_nobody() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, spread=Spread("node-0", fanout=1))
        registry.offer(manifest(0))

        async def ask(node: str, held: int, fault: str = "") -> WeightManifest | None:
            state = ReaderState(held, Pull(), Fault(0, fault) if fault else None, node)
            return await registry.newest(f"reader-{node}", state, wait_s=1.0)

        assert await ask("node-1", -1) is not None
        assert await ask("node-2", -1) is None, "one at a time from one node"
        assert await ask("node-1", -1, fault="it broke") is not None
        assert await ask("node-1", 0) is None, "it has it: nothing newer comes"
        both = await asyncio.gather(ask("node-2", -1), ask("node-3", -1))
        assert all(found is not None for found in both), "two have it, and serve two"

    run_virtual(scenario())


def test_a_node_where_a_reader_failed_serves_no_others() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, spread=Spread("node-0", fanout=1))
        registry.offer(manifest(0))

        async def ask(reader: str, node: str, held: int, fault: str = "") -> WeightManifest | None:
            state = ReaderState(held, fault=Fault(0, fault) if fault else None, node=node)
            return await registry.newest(reader, state, wait_s=1.0)

        assert await ask("generator-0", "node-1", -1) is not None
        assert await ask("generator-0", "node-1", 0) is None, "it has it: two nodes serve two"
        assert await ask("generator-1", "node-1", -1, fault="it broke") is not None
        assert await ask("generator-2", "node-2", -1) is None, "one pulls, from the only one left"

    run_virtual(scenario())


class Source:
    """Publishes after a while; version 3 as often without success as `failures` says."""

    def __init__(self, publish_s: float, *, failures: int = 0) -> None:
        self.publish_s = publish_s
        self.failures = failures
        self.versions: list[int] = []

    async def publish(self, version: int, readers: Sequence[str]) -> WeightManifest:
        self.versions.append(version)
        await asyncio.sleep(self.publish_s)
        if version == 3 and self.failures:
            self.failures -= 1
            raise WeightsError("the disk is full")
        return manifest(version)


def test_versions_are_published_beside_others_and_one_at_a_time() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        sources = {"policy": Source(2.0), "critic": Source(5.0)}
        registries = {role: WeightRegistry(keep_versions=2) for role in sources}
        publishing = Publishing(
            sources, registries, due=lambda role, version: role == "policy" or version % 2 == 0
        )
        assert await publishing.begin(0, first=True)
        assert clock() == 0.0, "it is published beside what follows"
        await asyncio.sleep(2.5)
        assert registries["policy"].version == 0 and registries["critic"].version == -1
        assert await publishing.begin(1)
        assert clock() == 5.0, "the version before is out"
        await publishing.settle()
        assert clock() == 7.0 and registries["critic"].version == 0

    run_virtual(scenario())


@pytest.mark.parametrize("failures", [1, PUBLISH_ATTEMPTS - 1, PUBLISH_ATTEMPTS])
def test_what_cannot_be_sent_is_tried_again_some_times_and_told_of(failures: int) -> None:
    told: list[tuple[str, Fault]] = []

    async def scenario() -> None:
        source, registry = Source(2.0, failures=failures), WeightRegistry(keep_versions=2)
        publishing = Publishing(
            {"policy": source}, {"policy": registry}, on_fault=lambda *one: told.append(one)
        )
        await publishing.begin(3)
        publishing.check()
        if failures < PUBLISH_ATTEMPTS:
            await publishing.settle()
            assert registry.version == 3
        else:
            with pytest.raises(WeightsError, match="the disk is full"):
                await publishing.settle()
            with pytest.raises(WeightsError, match="the disk is full"):
                publishing.check()
        assert registry.drain().num_faults == failures
        assert len(source.versions) == min(failures + 1, PUBLISH_ATTEMPTS)

    run_virtual(scenario())
    once = ("policy", Fault(3, "the disk is full"))
    assert told == [once] * min(failures, PUBLISH_ATTEMPTS - 1)


def test_a_version_somebody_waits_for_is_published_though_it_is_not_due() -> None:
    async def scenario() -> None:
        sources = {role: Source(0.0) for role in ("policy", "critic", MOVED)}
        registries = {role: WeightRegistry(keep_versions=2) for role in sources}
        publishing = Publishing(sources, registries, due=lambda role, version: False)
        assert not await publishing.begin(4)
        assert await publishing.begin(5, awaited=True)
        await publishing.settle()
        assert {role: source.versions for role, source in sources.items()} == {
            "policy": [5],
            "critic": [5],
            MOVED: [],
        }

    run_virtual(scenario())


def test_a_model_is_read_and_a_version_taken_up_while_nobody_else_computes() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        arbiter = Arbiter(timeout_s=100.0)
        trainer, generator = SharedLease(arbiter, "trainer"), SharedLease(arbiter, "generator-0")
        registry, held = WeightRegistry(keep_versions=2), HeldVersion("generator-0")
        publishing = Publishing({"policy": Source(2.0)}, {"policy": registry}, lease=trainer)
        place = replace(stage(), lease=generator)
        follow = follow_weights(place, Engine(), Channel(registry), held)
        async with generator.hold("generate"):
            await publishing.begin(0)
            await asyncio.sleep(10.0)
            assert registry.version == -1, "the generator computes"
        await publishing.settle()
        assert clock() == 12.0
        async with trainer.hold("train"):
            following = asyncio.create_task(follow)
            await asyncio.sleep(10.0)
            assert held.version == -1, "the trainer computes"
        await held.at_least(0)
        assert clock() == 22.5
        following.cancel()

    run_virtual(scenario())


def test_a_fault_is_told_once_though_nothing_newer_comes() -> None:
    told: list[tuple[str, str, Fault]] = []

    class Once(Channel):
        """Offers a version once, and nothing after that."""

        async def newest(self, held: ReaderState, *, wait_s: float) -> WeightManifest | None:
            await self.registry.newest("generator-0", held, wait_s=0.0)
            await asyncio.sleep(wait_s)
            return None if self.tries else manifest(7)

    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, on_trouble=lambda *one: told.append(one))
        channel, held = Once(registry, {7: 1}), HeldVersion("generator-0")
        following = asyncio.create_task(follow_weights(stage(), Engine(), channel, held))
        await asyncio.sleep(20.0)
        following.cancel()
        assert registry.drain().num_faults == 1

    run_virtual(scenario())
    assert told == [(REFUSED, "generator-0", Fault(7, "version 7: checksum is wrong"))]


def test_a_way_round_is_no_fault() -> None:
    told: list[tuple[str, str, Fault]] = []

    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2, on_trouble=lambda *one: told.append(one))
        pull = Pull(detour="it came too late")
        await registry.newest("generator-0", ReaderState(4, pull), wait_s=0.0)
        assert registry.drain().num_faults == 0

    run_virtual(scenario())
    assert told == [(DETOUR, "generator-0", Fault(4, "it came too late"))]


def test_skew_is_of_those_who_serve() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        registry.offer(manifest(6))
        for reader, version in {"generator-0": 4, "generator-1": -1}.items():
            await registry.newest(reader, ReaderState(version), wait_s=0.0)
        assert registry.drain().skew == 2

    run_virtual(scenario())


def test_what_critics_move_counts_and_what_they_pause_does_not() -> None:
    policy = Traffic([Pull(1.0, 0.25, 100, 7, probe_diff=0.5)], 0.5, 1, 2)
    critic = Traffic([Pull(4.0, 3.0, 900, 9)], 2.0, 3, 1)
    found = weight_metrics(policy, [critic, Traffic([], math.nan, 0, 0)])
    assert found == {
        "weights/skew_max": 3,
        "weights/publish_s": 2.0,
        "weights/pull_s": 4.0,
        "weights/pause_s": 0.25,
        "weights/bytes": 1000,
        "weights/bytes_per_s": 200.0,
        "weights/interrupted": 7,
        "weights/probe_diff": 0.5,
        "weights/faults": 3,
    }


def test_a_version_that_is_damaged_where_it_lies_is_sent_again_while_the_model_still_is_it() -> (
    None
):
    async def scenario() -> None:
        sources = {role: Source(1.0) for role in ("policy", MOVED)}
        registries = {role: WeightRegistry(keep_versions=2) for role in sources}
        publishing = Publishing(sources, registries, due=lambda role, version: version != 6)
        await publishing.begin(4)
        publishing.resend("policy", 4)  # it is still on its way
        await publishing.settle()
        publishing.resend("policy", 4)
        publishing.resend(MOVED, 4)
        publishing.resend("policy", 3)
        began = asyncio.get_running_loop().time()
        await publishing.settle()
        assert asyncio.get_running_loop().time() == began + 1.0, "nothing updates meanwhile"
        assert sources["policy"].versions == sources[MOVED].versions == [4, 4]
        publishing.changes("policy")
        for role in sources:
            publishing.resend(role, 4)
        await publishing.begin(5)
        await publishing.settle()
        await publishing.begin(6)
        publishing.resend("policy", 5)  # the model is 6
        await publishing.settle()
        assert sources["policy"].versions == [4, 4, 5]

    run_virtual(scenario())


def test_one_that_is_sent_again_while_others_are_waited_for_is_waited_for_too() -> None:
    async def scenario() -> None:
        sources = {"policy": Source(1.0), "critic": Source(5.0)}
        registries = {role: WeightRegistry(keep_versions=2) for role in sources}
        publishing = Publishing(sources, registries)
        await publishing.begin(0)
        settling = asyncio.create_task(publishing.settle())
        await asyncio.sleep(4.5)
        publishing.resend("policy", 0)
        await asyncio.sleep(0.75)
        assert not settling.done()
        await settling
        assert asyncio.get_running_loop().time() == 5.5

    run_virtual(scenario())


def test_who_could_not_verify_a_version_gets_the_one_that_is_sent_again() -> None:
    async def scenario() -> None:
        registry = WeightRegistry(keep_versions=2)
        for version in (3, 4, 4):
            registry.offer(manifest(version))
        first, again = [
            await registry.newest("generator-0", ReaderState(held), wait_s=0.0) for held in (3, 4)
        ]
        assert first is not None and first.version == 4
        assert again is None, "who holds it does not hear of it"
        with pytest.raises(WeightsError, match="version 3 was published after 4"):
            registry.offer(manifest(3))

    run_virtual(scenario())
