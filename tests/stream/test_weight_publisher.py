"""Weight publisher: concurrency, retries, resends, waits."""

import asyncio
from collections.abc import Callable

import pytest

from streamrl.dataflow import EMA_REFERENCE, POLICY
from streamrl.engines.trainer_config import ReferenceConfig
from streamrl.errors import WeightsError
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.weight_publisher import PUBLISH_ATTEMPTS, WeightPublisher, is_publish_due
from streamrl.weights import WeightManifest
from streamrl.weights.rank_slices import Readers
from streamrl.weights.versions import WeightFault, WeightRegistry
from tests.virtual_time import in_virtual_time


class Source:
    """Source that publishes after a delay; version 3 fails `failures` times."""

    def __init__(self, publish_s: float, *, failures: int = 0) -> None:
        self.publish_s = publish_s
        self.failures = failures
        self.versions: list[int] = []

    async def __call__(self, version: int, readers: Readers) -> WeightManifest:
        self.versions.append(version)
        await asyncio.sleep(self.publish_s)
        if version == 3 and self.failures:
            self.failures -= 1
            raise WeightsError("the disk is full")
        return WeightManifest(version, (), ())


def make_publisher(
    due: Callable[[str, int], bool] = lambda role, version: True, **publish_s: float
) -> tuple[WeightPublisher, dict[str, Source]]:
    """Return a publisher and its sources, which take these times, by role."""
    sources = {role: Source(seconds) for role, seconds in publish_s.items()}
    registries = {role: WeightRegistry(keep_versions=2) for role in sources}
    return WeightPublisher(sources, registries, due=due), sources


def test_ema_reference_follows_its_own_publish_schedule():
    def due(role: str) -> list[int]:
        reference = ReferenceConfig(every=3)
        return [
            version
            for version in range(8)
            if is_publish_due(role, version, every=2, reference=reference, forced=version == 7)
        ]

    assert due(POLICY) == [0, 2, 4, 6, 7]
    assert due(EMA_REFERENCE) == [3, 6]


@in_virtual_time
async def test_roles_publish_in_parallel_and_versions_in_order():
    clock = asyncio.get_running_loop().time
    publisher, _ = make_publisher(
        lambda role, version: role == "policy" or version % 2 == 0, policy=2.0, critic=5.0
    )
    registries = publisher.registries
    assert await publisher.begin_publish(0, first=True)
    assert clock() == 0.0, "the publish runs in the background"
    await asyncio.sleep(2.5)
    assert registries["policy"].version == 0 and registries["critic"].version == -1
    assert await publisher.begin_publish(1)
    assert clock() == 5.0, "the previous version is published"
    await publisher.wait_until_published()
    assert clock() == 7.0 and registries["critic"].version == 0


@pytest.mark.parametrize("failures", [1, PUBLISH_ATTEMPTS - 1, PUBLISH_ATTEMPTS])
def test_failed_publish_is_retried_and_reported(failures: int):
    faults: list[tuple[str, WeightFault]] = []

    async def scenario() -> None:
        source, registry = Source(2.0, failures=failures), WeightRegistry(keep_versions=2)
        publisher = WeightPublisher(
            {"policy": source},
            {"policy": registry},
            on_fault=lambda *fault_args: faults.append(fault_args),
        )
        await publisher.begin_publish(3)
        publisher.check_failures()
        if failures < PUBLISH_ATTEMPTS:
            await publisher.wait_until_published()
            assert registry.version == 3
        else:
            with pytest.raises(WeightsError, match="the disk is full"):
                await publisher.wait_until_published()
            with pytest.raises(WeightsError, match="the disk is full"):
                publisher.check_failures()
        assert registry.drain_stats().num_faults == failures
        assert len(source.versions) == min(failures + 1, PUBLISH_ATTEMPTS)

    run_virtual(scenario())
    fault = ("policy", WeightFault(3, "the disk is full"))
    assert faults == [fault] * min(failures, PUBLISH_ATTEMPTS - 1)


@in_virtual_time
async def test_awaited_version_is_published_though_not_due():
    publisher, sources = make_publisher(
        lambda role, version: False, **dict.fromkeys(("policy", "critic", EMA_REFERENCE), 0.0)
    )
    assert not await publisher.begin_publish(4)
    assert await publisher.begin_publish(5, awaited=True)
    await publisher.wait_until_published()
    assert {role: source.versions for role, source in sources.items()} == {
        "policy": [5],
        "critic": [5],
        EMA_REFERENCE: [],
    }


@in_virtual_time
async def test_corrupt_version_is_resent_while_the_model_is_unchanged():
    publish_s = dict.fromkeys(("policy", EMA_REFERENCE), 1.0)
    publisher, sources = make_publisher(lambda role, version: version != 6, **publish_s)
    await publisher.begin_publish(4)
    publisher.resend_version("policy", 4)  # version 4 is still being published
    await publisher.wait_until_published()
    publisher.resend_version("policy", 4)
    publisher.resend_version(EMA_REFERENCE, 4)
    publisher.resend_version("policy", 3)
    began = asyncio.get_running_loop().time()
    await publisher.wait_until_published()
    assert asyncio.get_running_loop().time() == began + 1.0, "both roles resend in parallel"
    assert sources["policy"].versions == sources[EMA_REFERENCE].versions == [4, 4]
    publisher.mark_changed("policy")
    for role in sources:
        publisher.resend_version(role, 4)
    await publisher.begin_publish(5)
    await publisher.wait_until_published()
    await publisher.begin_publish(6)
    publisher.resend_version("policy", 5)  # the model has version 6
    await publisher.wait_until_published()
    assert sources["policy"].versions == [4, 4, 5]


@in_virtual_time
async def test_wait_until_published_includes_resent_versions():
    publisher, _ = make_publisher(policy=1.0, critic=5.0)
    await publisher.begin_publish(0)
    settling = asyncio.create_task(publisher.wait_until_published())
    await asyncio.sleep(4.5)
    publisher.resend_version("policy", 0)
    await asyncio.sleep(0.75)
    assert not settling.done()
    await settling
    assert asyncio.get_running_loop().time() == 5.5
