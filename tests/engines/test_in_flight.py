"""Running rollouts during a weight load: prefilled again, or kept on their KV cache."""

import asyncio

import pytest
import pytest_asyncio

from tests.engines.flight import (
    CONCURRENT,
    LONG,
    POLICIES,
    SHORT,
    WIDE,
    Engines,
    Flight,
    sampled_versions,
)
from tests.engines.tiny_qwen import endless_model, worst_error

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("engines")]


# Session scope, so that tests with the same policy run one after another.
@pytest.fixture(scope="session", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def parametrize_policies(*policies: str) -> pytest.MarkDecorator:
    """Parametrize a test by engines of these policies."""
    return pytest.mark.parametrize("policy", policies, indirect=True, scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def flight(policy: str, engines: Engines) -> Flight:
    """Return the engine of a policy, serving the model of seed 1."""
    flight = await engines.get(WIDE, policy)
    await flight.load(endless_model(seed=1))
    return flight


async def test_a_weight_load_interrupts_no_rollout_and_versions_match_the_decode_steps(
    flight: Flight,
):
    first = max(flight.models)
    running = asyncio.create_task(flight.engine.generate(SHORT, seeds=range(CONCURRENT)))
    await asyncio.sleep(0)
    (number,) = flight.engine._requests
    loads = []
    for seed in (2, 3):
        await flight.wait_for_steps(20)
        loads.append(await flight.load(endless_model(seed=seed)))
    rollouts = await running
    versions = sampled_versions(rollouts)
    assert [len(v) for v in versions] == [150] * CONCURRENT
    assert versions == flight.logged_versions(number, CONCURRENT)
    assert all(0 < loaded.pause_s < 5 for loaded in loads)
    assert {v for row in versions for v in row} == {first, first + 1, first + 2}
    assert [loaded.num_interrupted for loaded in loads] == [CONCURRENT] * 2
    if flight.policy != "keep":
        assert worst_error(rollouts[::8], flight.models) < 1e-4
    fresh = await flight.engine.generate(SHORT, seeds=range(4))
    assert worst_error(fresh, flight.models) < 1e-4


async def test_new_and_waiting_requests_use_no_prefix_of_old_weights(flight: Flight):
    # More than the slots, so that some requests wait while the weights change.
    old = max(flight.models)
    calls = [
        asyncio.create_task(flight.engine.generate(LONG, seeds=[i], max_new_tokens=60))
        for i in range(CONCURRENT + 32)
    ]
    new = endless_model(seed=4)
    await flight.wait_for_steps(5)
    loading = asyncio.create_task(flight.load(new))
    await asyncio.sleep(0)
    later = asyncio.create_task(flight.engine.generate(LONG, seeds=range(4), max_new_tokens=20))
    await loading
    queued = [rollout for call in calls for rollout in await call]
    interrupted = [r for r in queued if old in r.policy_version]
    waiting = [r for r in queued if old not in r.policy_version]
    assert (len(interrupted), len(waiting)) == (CONCURRENT, 32)
    started = [*waiting, *await later]
    assert worst_error(started, {old + 1: flight.models[old + 1]}) < 1e-4
    if flight.policy != "keep":
        assert worst_error(interrupted[::8], flight.models) < 1e-4


@parametrize_policies("keep")
async def test_a_kept_kv_cache_is_not_computed_again(flight: Flight):
    running = asyncio.create_task(flight.engine.generate(LONG, seeds=range(4)))
    await flight.wait_for_steps(20)
    await flight.load(endless_model(seed=2))
    assert worst_error(await running, flight.models) > 1e-2
