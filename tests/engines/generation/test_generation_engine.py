"""A real vLLM engine with a tiny random model, through several versions."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import pytest_asyncio
import torch

from streamrl.engines.generator_config import SamplingSettings
from streamrl.engines.models.forward import compute_token_logprobs
from streamrl.errors import ConfigError, WeightsError
from streamrl.messages import FinishReason, Rollout
from tests.engines.flight import CONCURRENT, SHORT, WIDE, Engines, Flight
from tests.engines.tiny_qwen import (
    EOS,
    MAX_LENGTH,
    VOCABULARY,
    endless_model,
    prompt,
    tiny_model,
    weights_of,
    worst_error,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("engines")]


@pytest_asyncio.fixture(loop_scope="session")
async def flight(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Flight:
    """Return the shared engine, serving the model of seed 1."""
    flight = await engines.get(WIDE)
    monkeypatch.setattr(flight.config, "max_new_tokens", 32)
    await flight.load(tiny_model(tied=False, seed=1))
    return flight


async def sample(flight: Flight, num: int, *, max_new_tokens: int) -> list[Rollout]:
    """Sample a rollout of each of `num` different prompts concurrently."""
    calls = [
        flight.engine.generate(prompt(5 + i % 50, 7, 9), seeds=[i], max_new_tokens=max_new_tokens)
        for i in range(num)
    ]
    return [rollout for group in await asyncio.gather(*calls) for rollout in group]


def list_token_ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_the_sampling_distribution(flight: Flight, temperature: float):
    rollouts = await flight.engine.generate(
        SHORT, seeds=range(16), sampling=SamplingSettings(temperature)
    )
    assert worst_error(rollouts, flight.models, temperature=temperature) < 1e-4


@pytest.mark.parametrize(
    "mask", [{"top_k": 5}, {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "min_p": 0.2}], ids=repr
)
async def test_the_trainer_renormalizes_over_the_words_that_vllm_sampled_from(
    flight: Flight, monkeypatch: pytest.MonkeyPatch, mask: dict[str, float]
):
    monkeypatch.setattr(flight.config, "sampling_mask", mask)
    rollouts = await flight.engine.generate(SHORT, seeds=range(8))
    model = flight.models[flight.engine.version]
    for rollout in rollouts:
        ids = torch.from_numpy(rollout.token_ids).long()[None]
        words = torch.from_numpy(rollout.wide["sampling_mask"])
        assert words.shape == (ids.shape[1], mask["top_k"])
        num_kept = (words >= 0).sum(-1).numpy()
        assert (num_kept[: len(SHORT)] == 0).all() and (num_kept[len(SHORT) :] > 0).all()
        if mask.keys() == {"top_k"}:
            assert (num_kept[len(SHORT) :] == 5).all()
        with torch.no_grad():
            scores = compute_token_logprobs(
                model, ids, ids >= 0, temperature=1.0, sampling_mask=words[None]
            )
            probs = model(ids).logits[0].softmax(-1)
        sampled = rollout.loss_mask
        np.testing.assert_allclose(
            scores.logprobs[0].numpy()[sampled], rollout.generator_logprobs[sampled], atol=1e-4
        )
        for at in np.flatnonzero(sampled):
            kept = probs[at - 1][words[at][words[at] >= 0].long()]
            if "min_p" in mask:
                assert kept.min() >= 0.2 * probs[at - 1].max() * (1 - 1e-5)
            if "top_p" in mask:
                assert kept.sum() - kept.min() < 0.8 + 1e-5


@pytest.mark.parametrize(
    "sampling",
    [SamplingSettings(0.0), SamplingSettings(1.0, top_k=1), SamplingSettings(1.0, top_p=1e-6)],
)
async def test_the_likeliest_tokens_are_decoded(flight: Flight, sampling: SamplingSettings):
    model = flight.models[flight.engine.version]
    (rollout,) = await flight.engine.generate(SHORT, seeds=[0], sampling=sampling)
    with torch.no_grad():
        best = model(torch.from_numpy(rollout.token_ids).long()[None]).logits[0].argmax(-1)
    first = len(SHORT)
    assert rollout.token_ids[first:].tolist() == best[first - 1 : -1].tolist()


async def test_the_eos_token_ends_a_rollout_and_is_included(flight: Flight):
    rollouts = await flight.engine.generate(SHORT, seeds=range(64), max_new_tokens=40)
    stopped = [r for r in rollouts if r.finish_reason is FinishReason.STOP]
    cut = [r for r in rollouts if r.finish_reason is FinishReason.LENGTH]
    assert stopped and cut and len(stopped) + len(cut) == 64
    for rollout in stopped:
        assert rollout.completion_ids[-1] == EOS
        assert EOS not in rollout.completion_ids[:-1]
    for rollout in cut:
        assert len(rollout.completion_ids) == 40
        assert EOS not in rollout.completion_ids[:-1]


async def test_a_rollout_that_fills_the_context_finishes_by_length(flight: Flight):
    await flight.load(endless_model(seed=1))
    full = prompt(*(4 + i % 50 for i in range(MAX_LENGTH - 10)))
    (rollout,) = await flight.engine.generate(full, seeds=[0], max_new_tokens=400)
    assert len(rollout.token_ids) == MAX_LENGTH
    assert rollout.finish_reason is FinishReason.LENGTH


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(flight: Flight):
    expected = await flight.engine.generate(SHORT, seeds=[11, 12])
    other_requests = asyncio.create_task(sample(flight, 60, max_new_tokens=50))
    await asyncio.sleep(0.02)
    batched = await flight.engine.generate(SHORT, seeds=[12, 13, 11])
    await other_requests
    assert list_token_ids([batched[2], batched[0]]) == list_token_ids(expected)
    np.testing.assert_allclose(
        batched[2].generator_logprobs, expected[0].generator_logprobs, atol=1e-4
    )


async def test_old_versions_and_wrong_parameters_are_rejected_without_harm(flight: Flight):
    current, weights = flight.engine.version, weights_of(tiny_model(tied=False, seed=2))
    with pytest.raises(WeightsError, match=f"version {current} came after version {current}"):
        await flight.engine.load_weights(weights, current)
    weights["model.norm.weight"] = torch.ones(63)
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(63,\)"):
        await flight.engine.load_weights(weights, current + 1)
    assert flight.engine.version == current
    assert worst_error(await flight.engine.generate(SHORT, seeds=[1]), flight.models) < 1e-4


@pytest.mark.parametrize(
    ("prompt_ids", "fault"),
    [
        (prompt(), "a prompt of 0 tokens"),
        (prompt(5, VOCABULARY), f"token ids 5 to {VOCABULARY}"),
    ],
)
async def test_an_invalid_prompt_fails_alone(flight: Flight, prompt_ids: np.ndarray, fault: str):
    running = asyncio.create_task(flight.engine.generate(SHORT, seeds=range(8)))
    with pytest.raises(ConfigError, match=fault):
        await flight.engine.generate(prompt_ids, seeds=range(8))
    assert len(await running) == 8
    assert flight.engine.num_running == 0


async def test_token_counts_tell_sequences_that_grow_from_those_that_wait(flight: Flight):
    await flight.load(endless_model(seed=1))
    running = flight.engine.generate(SHORT, seeds=range(CONCURRENT), max_new_tokens=60)
    waiting = flight.engine.generate(SHORT, seeds=range(4), max_new_tokens=5)
    groups = asyncio.gather(running, waiting)
    await flight.wait_for_steps(10)
    counts = await flight.engine._thread.count_tokens()
    assert Counter(count.is_running for count in counts.values()) == {True: CONCURRENT, False: 4}
    grown = [count.num_tokens for count in counts.values() if count.is_running]
    assert 0 < min(grown) <= max(grown) < 60
    assert {count.num_tokens for count in counts.values() if not count.is_running} == {0}
    assert [len(group) for group in await groups] == [CONCURRENT, 4]
    assert await flight.engine._thread.count_tokens() == {}


async def test_a_cancelled_call_frees_its_slots(flight: Flight):
    await flight.load(endless_model(seed=1))
    call = asyncio.create_task(flight.engine.generate(SHORT, seeds=range(64), max_new_tokens=500))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert flight.engine.num_running == 0
    async with asyncio.timeout(5):
        await flight.engine.generate(SHORT, seeds=range(64), max_new_tokens=4)
