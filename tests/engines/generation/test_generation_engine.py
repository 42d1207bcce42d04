"""A real vLLM engine with a tiny random model, through several versions."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import Qwen2ForCausalLM

from streamrl.engines.generator_config import STEP_TOKENS_ON_CPU, SamplingSettings
from streamrl.errors import ConfigError, WeightsError
from streamrl.messages import FinishReason, Rollout
from streamrl.weights.lora_merge import LORA_A_SUFFIX, LORA_B_SUFFIX, LORA_SCALE
from tests.engines.flight import CONCURRENT, LONG, SHORT, WIDE, Engines, Flight
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


async def test_temperature_0_decodes_greedily(flight: Flight):
    model = flight.models[flight.engine.version]
    (rollout,) = await flight.engine.generate(SHORT, seeds=[0], sampling=SamplingSettings(0.0))
    with torch.no_grad():
        best = model(torch.from_numpy(rollout.token_ids).long()[None]).logits[0].argmax(-1)
    first = len(SHORT)
    assert rollout.token_ids[first:].tolist() == best[first - 1 : -1].tolist()
    assert worst_error([rollout], flight.models) < 1e-4


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}])
async def test_top_k_and_top_p_sample_among_the_likeliest_tokens(
    flight: Flight, settings: dict[str, float]
):
    greedy = await flight.engine.generate(SHORT, seeds=[0], sampling=SamplingSettings(0.0))
    sampling = SamplingSettings(1.0, **settings)  # type: ignore[arg-type]
    rollouts = await flight.engine.generate(SHORT, seeds=[7], sampling=sampling)
    assert list_token_ids(rollouts) == list_token_ids(greedy)


async def test_a_rollout_is_the_prompt_and_the_sampled_tokens(flight: Flight):
    (rollout,) = await flight.engine.generate(SHORT, seeds=[3])
    assert rollout.token_ids[: len(SHORT)].tolist() == SHORT.tolist()
    assert rollout.loss_mask.tolist() == [False] * 4 + [True] * (len(rollout.token_ids) - 4)
    assert set(rollout.policy_version[4:].tolist()) == {flight.engine.version}


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


async def test_a_seed_may_be_any_integer_type(flight: Flight):
    plain = await flight.engine.generate(SHORT, seeds=[2**63 - 1, 5])
    numpy = await flight.engine.generate(SHORT, seeds=list(np.array([2**63 - 1, 5], np.uint64)))
    assert list_token_ids(plain) == list_token_ids(numpy)


async def test_different_seeds_differ(flight: Flight):
    rollouts = await flight.engine.generate(SHORT, seeds=range(32))
    assert len({tuple(row) for row in list_token_ids(rollouts)}) == 32


async def test_more_rollouts_than_slots_all_finish(flight: Flight):
    calls = asyncio.gather(*(flight.engine.generate(SHORT, seeds=[i, i + 100]) for i in range(100)))
    await asyncio.sleep(0)
    assert flight.engine.num_running == 200
    assert [len(group) for group in await calls] == [2] * 100
    assert flight.engine.num_running == 0


async def test_prompts_beyond_the_token_budget_of_a_step_all_finish(flight: Flight):
    prompts = [prompt(*np.roll(LONG, i).tolist()) for i in range(20)]
    assert sum(map(len, prompts)) > STEP_TOKENS_ON_CPU
    groups = await asyncio.gather(*(flight.engine.generate(p, seeds=[1, 2]) for p in prompts))
    assert worst_error([rollout for group in groups for rollout in group], flight.models) < 1e-4


async def test_every_parameter_of_a_new_version_is_loaded(flight: Flight):
    model = tiny_model(tied=False, seed=1)
    before = await flight.engine.generate(SHORT, seeds=range(4))
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.manual_seed(7))
        await flight.load(model)
        rollouts = await flight.engine.generate(SHORT, seeds=range(4))
        assert worst_error(rollouts, flight.models) < 1e-4, name
        changed = [r.generator_logprobs.tolist() for r in rollouts]
        if not name.endswith("k_proj.bias"):  # adds the same to all scores of a query
            assert changed != [r.generator_logprobs.tolist() for r in before], name
        before = rollouts


async def test_weights_may_be_read_only_arrays(flight: Flight):
    model = tiny_model(tied=False, seed=6)
    arrays = {name: tensor.numpy().copy() for name, tensor in weights_of(model).items()}
    for array in arrays.values():
        array.flags.writeable = False
    version = flight.engine.version + 1
    await flight.engine.load_weights(arrays, version)
    flight.models[version] = model
    assert worst_error(await flight.engine.generate(SHORT, seeds=range(8)), flight.models) < 1e-4


def make_adapters(model: Qwen2ForCausalLM, *, size: float, seed: int) -> dict[str, torch.Tensor]:
    """Make adapters of rank 2 and scale 1.5 for every linear layer but the head."""
    generator = torch.Generator().manual_seed(seed)
    published = {LORA_SCALE: torch.tensor(1.5)}
    for name, layer in model.model.named_modules(prefix="model"):
        if isinstance(layer, torch.nn.Linear):
            num_out, num_in = layer.weight.shape
            published[name + LORA_A_SUFFIX] = torch.randn(2, num_in, generator=generator)
            published[name + LORA_B_SUFFIX] = size * torch.randn(num_out, 2, generator=generator)
    return published


async def test_each_version_merges_adapters_into_the_weights_of_the_directory(flight: Flight):
    for seed, size in ((1, 0.1), (2, 0.0), (3, 0.1)):
        model = tiny_model(tied=False, seed=1)
        published = make_adapters(model, size=size, seed=seed)
        with torch.no_grad():
            for name in [name for name in published if name.endswith(LORA_A_SUFFIX)]:
                layer = name.removesuffix(LORA_A_SUFFIX)
                product = published[layer + LORA_B_SUFFIX] @ published[name]
                model.get_submodule(layer).weight += 1.5 * product
        await flight.load(tiny_model(tied=False, seed=8))
        version = flight.engine.version + 1
        loaded = await flight.engine.load_weights(published, version)
        layers = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
        merged = sum(layer.weight.nbytes for layer in layers)
        assert merged <= loaded.copied_bytes <= sum(p.nbytes for p in model.parameters())
        flight.models[version] = model
        rollouts = await flight.engine.generate(SHORT, seeds=range(16))
        assert worst_error(rollouts, flight.models) < 1e-4
        if size == 0.0:
            await flight.load(model)
            again = await flight.engine.generate(SHORT, seeds=range(16))
            for before, after in zip(rollouts, again, strict=True):
                assert np.array_equal(before.generator_logprobs, after.generator_logprobs)


async def test_adapters_of_another_model_are_rejected_without_harm(flight: Flight):
    published = make_adapters(tiny_model(tied=False, seed=1), size=0.1, seed=1)
    published["model.layers.0.mlp.up_proj" + LORA_A_SUFFIX] = torch.ones(2, 63)
    with pytest.raises(WeightsError, match=r"adapter of .*up_proj.* fit no weight of the model"):
        await flight.engine.load_weights(published, flight.engine.version + 1)
    assert worst_error(await flight.engine.generate(SHORT, seeds=[1]), flight.models) < 1e-4


async def test_rollouts_survive_weight_loads_and_tokens_record_their_version(flight: Flight):
    await flight.load(endless_model(seed=1))
    first = flight.engine.version
    running = asyncio.create_task(sample(flight, 32, max_new_tokens=200))
    for seed in (2, 3):
        await asyncio.sleep(0.1)
        assert flight.engine.num_running == 32
        await flight.load(endless_model(seed=seed))
    last = flight.engine.version
    rollouts = await running
    versions = [rollout.policy_version[rollout.loss_mask] for rollout in rollouts]
    assert [len(v) for v in versions] == [200] * 32
    assert all((np.diff(v) >= 0).all() for v in versions), "versions only rise"
    assert {int(v) for v in np.concatenate(versions)} == set(range(first, last + 1))
    assert worst_error(rollouts, flight.models) < 1e-4


async def test_loading_the_same_weights_changes_no_token(flight: Flight):
    await flight.load(endless_model(seed=1))
    expected = await sample(flight, 32, max_new_tokens=100)
    running = asyncio.create_task(sample(flight, 32, max_new_tokens=100))
    await asyncio.sleep(0.1)
    await flight.load(endless_model(seed=1))
    last = flight.engine.version
    rollouts = await running
    assert any((r.policy_version == last).any() for r in rollouts)
    assert list_token_ids(rollouts) == list_token_ids(expected)


async def test_a_weight_load_invalidates_the_prefix_cache(flight: Flight):
    await flight.engine.generate(LONG, seeds=range(4))
    running = asyncio.create_task(flight.engine.generate(LONG, seeds=range(4), max_new_tokens=99))
    await asyncio.sleep(0.02)
    await flight.load(tiny_model(tied=False, seed=8))
    rollouts = await flight.engine.generate(LONG, seeds=range(4))
    assert worst_error([*rollouts, *await running], flight.models) < 1e-4


@pytest.mark.parametrize("step", [0, -1])
async def test_a_version_that_is_not_newer_is_rejected(flight: Flight, step: int):
    current = flight.engine.version
    message = f"version {current + step} came after version {current}"
    with pytest.raises(WeightsError, match=message):
        await flight.engine.load_weights(weights_of(tiny_model(tied=False, seed=2)), current + step)
    assert flight.engine.version == current
    assert worst_error(await flight.engine.generate(SHORT, seeds=[1]), flight.models) < 1e-4


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"model.norm.weight": None}, "lack 1 parameters, such as model.norm.weight"),
        (
            {"model.nrm.weight": torch.ones(64)},
            "have unknown 1 parameters, such as model.nrm.weight",
        ),
        ({"model.norm.weight": torch.ones(63)}, r"model.norm.weight has shape \(63,\)"),
    ],
)
async def test_wrong_parameters_are_rejected_without_harm(
    flight: Flight, change: dict[str, torch.Tensor | None], fault: str
):
    weights = {**weights_of(tiny_model(tied=False, seed=2)), **change}
    with pytest.raises(WeightsError, match=fault):
        await flight.engine.load_weights(
            {name: tensor for name, tensor in weights.items() if tensor is not None},
            flight.engine.version + 1,
        )
    assert worst_error(await flight.engine.generate(SHORT, seeds=[1]), flight.models) < 1e-4


@pytest.mark.parametrize(
    ("prompt_ids", "fault"),
    [
        (prompt(*[5] * MAX_LENGTH), f"a prompt of {MAX_LENGTH} tokens"),
        (prompt(), "a prompt of 0 tokens"),
        (prompt(5, VOCABULARY), f"token ids 5 to {VOCABULARY}"),
        (prompt(-1, 5), "token ids -1 to 5"),
    ],
)
async def test_an_invalid_prompt_fails_alone(flight: Flight, prompt_ids: np.ndarray, fault: str):
    running = asyncio.create_task(flight.engine.generate(SHORT, seeds=range(8)))
    with pytest.raises(ConfigError, match=fault):
        await flight.engine.generate(prompt_ids, seeds=range(8))
    assert len(await running) == 8
    assert flight.engine.num_running == 0


async def test_a_request_that_vllm_rejects_fails_alone(flight: Flight):
    running = asyncio.create_task(flight.engine.generate(SHORT, seeds=range(8)))
    with pytest.raises(ConfigError, match=r"vLLM rejected the request: .*temperature"):
        await flight.engine.generate(SHORT, seeds=range(8), sampling=SamplingSettings(-1.0))
    assert len(await running) == 8
    assert flight.engine.num_running == 0


@pytest.mark.parametrize("seeds", [[], [3, -1], [2**63]])
async def test_seeds_must_be_given_and_fit_int64(flight: Flight, seeds: list[int]):
    with pytest.raises(ValueError, match="seeds"):
        await flight.engine.generate(SHORT, seeds=seeds)


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
    await flight.wait_for_steps(2)
    assert await flight.engine.count_tokens() != {n: c.num_tokens for n, c in counts.items()}
    assert [len(group) for group in await groups] == [CONCURRENT, 4]
    assert await flight.engine.count_tokens() == {}


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
