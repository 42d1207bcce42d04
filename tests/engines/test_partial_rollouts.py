"""Partial rollouts: collected while running, resumed elsewhere; logprobs of given sequences."""

import asyncio

import numpy as np
import pytest
import pytest_asyncio

from streamrl.engines.generation.generation_engine import ProgressWatch
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.errors import ConfigError
from streamrl.messages import (
    FinishReason,
    Rollout,
    columns_to_rollouts,
    make_empty_rollout,
    rollouts_to_columns,
)
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.parameters import order_for_fusion
from streamrl.weights.versions import NUM_SEQUENCES
from tests.engines.flight import LONG, SHORT, Engines, Flight, sampled_versions
from tests.engines.tiny_qwen import (
    MAX_LENGTH,
    endless_model,
    prompt,
    tiny_model,
    weights_of,
    worst_error,
)
from tests.weights.local_transport import LocalWriter

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("engines")]

LIMIT = 100
CONCURRENT = 16


# The engine adds slots for a logprob check.
NARROW = GeneratorConfig(max_new_tokens=LIMIT, max_concurrent_rollouts=CONCURRENT - NUM_SEQUENCES)


@pytest_asyncio.fixture(loop_scope="session")
async def flight(engines: Engines) -> Flight:
    """Return the engine, serving the model of seed 1."""
    flight = await engines.get(NARROW)
    await flight.load(endless_model(seed=1))
    return flight


async def sample_partially(flight: Flight, num: int, *, steps: int) -> list[Rollout]:
    """Return partial rollouts after some steps, then abort them."""
    call = asyncio.create_task(
        flight.engine.generate(SHORT, seeds=range(num), watch=ProgressWatch("a"))
    )
    await flight.wait_for_steps(steps)
    (columns,) = (await flight.engine.collect_partial_rollouts()).values()
    call.cancel()
    await asyncio.wait([call])
    return columns_to_rollouts(columns)


async def test_a_partial_rollout_keeps_its_sampling_masks(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(flight.config, "sampling_mask", {"top_k": 4})
    partials = await sample_partially(flight, 3, steps=10)
    # A rollout that another engine has not begun has no mask yet.
    partials[2] = make_empty_rollout(SHORT)
    partials = columns_to_rollouts(rollouts_to_columns(partials))
    assert (partials[2].wide["sampling_mask"] == -1).all()
    rollouts = await flight.engine.generate(SHORT, seeds=range(3), partial_rollouts=partials)
    for rollout, before in zip(rollouts, partials, strict=True):
        masks = rollout.wide["sampling_mask"]
        assert np.array_equal(masks[: len(before.token_ids)], before.wide["sampling_mask"])
        assert masks.shape == (len(rollout.token_ids), 4)
        assert ((masks >= 0).all(1) == rollout.loss_mask).all()
        assert (masks == rollout.token_ids[:, None]).any(1)[rollout.loss_mask].all()


async def test_a_partial_rollout_resumes_with_new_weights(flight: Flight):
    old = max(flight.models)
    partials = await sample_partially(flight, 4, steps=10)
    sizes = [len(rollout.completion_ids) for rollout in partials]
    assert all(10 <= size < LIMIT for size in sizes)
    assert {rollout.finish_reason for rollout in partials} == {FinishReason.ABORT}
    assert worst_error(partials, flight.models) < 1e-4
    await flight.load(endless_model(seed=2))
    rollouts = await flight.engine.generate(SHORT, seeds=range(4), partial_rollouts=partials)
    for rollout, before, size in zip(rollouts, partials, sizes, strict=True):
        num_kept = len(before.token_ids)
        for name in ("token_ids", "loss_mask", "generator_logprobs", "policy_version"):
            assert np.array_equal(vars(rollout)[name][:num_kept], vars(before)[name])
        assert sampled_versions([rollout]) == [[old] * size + [old + 1] * (LIMIT - size)]
        assert rollout.finish_reason is FinishReason.LENGTH
    assert worst_error(rollouts, flight.models) < 1e-4
    repeated = await flight.engine.generate(SHORT, seeds=range(4), partial_rollouts=partials)
    assert [r.token_ids.tolist() for r in repeated] == [r.token_ids.tolist() for r in rollouts]


async def test_resume_returns_finished_rollouts_and_finishes_full_ones_by_length(flight: Flight):
    await flight.load(tiny_model(tied=False, seed=1))
    finished = await flight.engine.generate(SHORT, seeds=range(8))
    assert {r.finish_reason for r in finished} == {FinishReason.STOP, FinishReason.LENGTH}
    resumed = await flight.engine.generate(SHORT, seeds=range(8), partial_rollouts=finished)
    assert all(rollout is expected for rollout, expected in zip(resumed, finished, strict=True))
    await flight.load(endless_model(seed=1))
    partials = await sample_partially(flight, 2, steps=10)
    size = len(partials[0].completion_ids)
    mixed = [finished[0], partials[1]]
    first, second = await flight.engine.generate(SHORT, seeds=[5, 6], partial_rollouts=mixed)
    assert first is finished[0]
    assert len(second.completion_ids) == LIMIT
    (full,) = await flight.engine.generate(
        SHORT, seeds=[0], partial_rollouts=partials[:1], max_new_tokens=size
    )
    assert full.finish_reason is FinishReason.LENGTH
    assert full.token_ids.tolist() == partials[0].token_ids.tolist()


async def test_partial_rollouts_of_watched_calls_include_waiting_and_finished_ones(flight: Flight):
    assert await flight.engine.collect_partial_rollouts() == {}
    unwatched = asyncio.create_task(flight.engine.generate(SHORT, seeds=range(2)))
    calls = {
        name: asyncio.create_task(
            flight.engine.generate(
                SHORT, seeds=range(12), watch=ProgressWatch(name), max_new_tokens=80
            )
        )
        for name in ("a", "b")
    }
    await flight.wait_for_steps(5)
    partials = await flight.engine.collect_partial_rollouts()
    rollouts_by_call = {name: columns_to_rollouts(columns) for name, columns in partials.items()}
    assert rollouts_by_call.keys() == {"a", "b"}
    sizes = {
        name: [len(r.completion_ids) for r in rollouts]
        for name, rollouts in rollouts_by_call.items()
    }
    assert all(5 <= size < 80 for size in sizes["a"]), "16 run at once: 2, 12 and 2"
    assert [size > 0 for size in sizes["b"]] == [True] * 2 + [False] * 10
    for name, call in calls.items():
        for partial, finished in zip(rollouts_by_call[name], await call, strict=True):
            num = len(partial.token_ids)
            assert partial.finish_reason is FinishReason.ABORT
            assert partial.token_ids.tolist() == finished.token_ids[:num].tolist()
            assert np.array_equal(partial.generator_logprobs, finished.generator_logprobs[:num])
            assert np.array_equal(partial.policy_version, finished.policy_version[:num])
    await unwatched


async def test_compute_logprobs_uses_the_served_weights(flight: Flight):
    sequences = [LONG, SHORT, prompt(7), LONG[: MAX_LENGTH - 1]]
    running = asyncio.create_task(flight.engine.generate(LONG, seeds=range(16)))
    await asyncio.sleep(0.02)
    loading = asyncio.create_task(flight.load(endless_model(seed=2)))
    results = await flight.engine.compute_logprobs(sequences)
    await loading

    def measure_error(version: int) -> float:
        rollouts = [
            Rollout(
                token_ids=sequence,
                loss_mask=np.arange(len(sequence)) > 0,
                generator_logprobs=logprobs,
                policy_version=np.full(len(sequence), version, np.int32),
                finish_reason=FinishReason.ABORT,
            )
            for sequence, logprobs in zip(sequences, results, strict=True)
        ]
        return worst_error(rollouts, flight.models)

    # All sequences are of the version before or of that after the load.
    assert min(map(measure_error, flight.models)) < 1e-4
    await running
    with pytest.raises(ConfigError, match="512 tokens"):
        await flight.engine.compute_logprobs([prompt(*[5] * MAX_LENGTH)])


async def test_adjacent_tensors_of_a_bucket_are_served_without_a_copy(flight: Flight):
    # In the model's order, q's bias is between q and k.
    for order, is_copied in ((order_for_fusion, False), (list, True)):
        version = max(flight.models) + 1
        model = flight.models[version] = endless_model(seed=version)
        weights = {name: weights_of(model)[name] for name in order(weights_of(model))}
        manifest = publish_version(
            weights.items(), version=version, bucket_bytes=1 << 22, writer=LocalWriter()
        )
        for data in manifest.handles:
            data.flags.writeable = False
        loaded = await flight.engine.load_weights(
            unpack_tensors(manifest, manifest.handles), version
        )
        assert bool(loaded.copied_bytes) is is_copied
        assert loaded.copied_bytes < sum(tensor.nbytes for tensor in weights.values())
        rollouts = await flight.engine.generate(SHORT, seeds=range(4))
        assert worst_error(rollouts, flight.models) < 1e-4
