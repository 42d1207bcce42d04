"""Every parameter reaches vLLM, initially and while rollouts run."""

import asyncio
import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm import plain_layers
from streamrl.messages import Rollout
from tests.engines.flight import start_engine
from tests.engines.tiny_qwen import (
    forward_logprobs,
    prompt,
    save,
    tiny_model,
    weights_of,
    worst_error,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.xdist_group("engines"),
    pytest.mark.usefixtures("no_engine"),
]

PROMPT = prompt(5, 14, 6, 18, 7, 9)
GROUPS = (
    *("embed_tokens", r"[qkv]_proj\.weight", r"q_proj\.weight", r"k_proj\.weight"),
    *(r"v_proj\.weight", r"[qkv]_proj\.bias", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("layernorm", r"model\.norm"),
)
"""Patterns of the names of parameters that change together."""
CONFIG = GeneratorConfig(max_new_tokens=12)


@torch.no_grad()
def change_group(model: PreTrainedModel, pattern: str) -> PreTrainedModel:
    """Return the model with other values in a group of parameters."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if re.search(pattern, name):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


async def check_each_group(engine: GenerationEngine, base: PreTrainedModel) -> None:
    """Change each group of parameters in turn while rollouts run; check that samples follow."""
    models: dict[int, PreTrainedModel] = {0: base}
    await engine.load_weights(weights_of(base), 0)

    def start_rollouts() -> asyncio.Task[Sequence[Rollout]]:
        return asyncio.create_task(engine.generate(PROMPT, seeds=range(2), max_new_tokens=500))

    rollouts: list[Rollout] = []
    running = start_rollouts()
    for version, group in enumerate(GROUPS, 1):
        models[version] = change_group(models[version - 1], group)
        await engine.load_weights(weights_of(models[version]), version)
        fresh = await engine.generate(PROMPT, seeds=range(4))
        new, old = ([forward_logprobs(models[v], r) for r in fresh] for v in (version, version - 1))
        assert max(np.abs(a - b).max() for a, b in zip(new, old, strict=True)) > 1e-2, group
        assert worst_error(fresh, models) < 1e-4, group
        if running.done():
            rollouts += running.result()
            running = start_rollouts()
    rollouts += await running
    versions = [set(rollout.policy_version[len(PROMPT) :]) for rollout in rollouts]
    assert max(map(len, versions)) > 1, "a load while a rollout runs"
    # The models have ever larger weights: of a thousand tokens, rounding in float32 puts some 1e-4
    # off; a group that was not loaded differs a hundred times as much.
    assert worst_error(rollouts, models) < 1e-3


@pytest.mark.parametrize("starts_empty", [False, True])
async def test_each_group_of_parameters_is_loaded(tmp_path: Path, starts_empty: bool):
    base = tiny_model(tied=True, seed=1)
    folder = save(base, tmp_path, ends=False)
    async with start_engine(folder, CONFIG, starts_empty=starts_empty) as engine:
        await check_each_group(engine, base)


@pytest.mark.slow
async def test_large_layers_use_onednn_and_bfloat16_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plain_layers, "MIN_ONEDNN_ELEMENTS", 1)
    base = tiny_model(tied=True, seed=1)
    folder = save(base, tmp_path, ends=False)
    async with start_engine(folder, CONFIG) as engine:
        await engine.load_weights(weights_of(base), 0)
        assert worst_error(await engine.generate(PROMPT, seeds=range(4)), {0: base}) < 1e-4
    async with start_engine(folder, replace(CONFIG, dtype="bfloat16")) as engine:
        # Float32 tensors cannot be aliased: they are copied and rounded.
        loaded = await engine.load_weights(weights_of(base), 0)
        assert loaded.copied_bytes == sum(w.nbytes for w in weights_of(base).values()) // 2
        rollouts = await engine.generate(PROMPT, seeds=range(4))
        assert worst_error(rollouts, {0: base}) < 0.3
