"""Every parameter of every model family reaches vLLM, initially and while rollouts run."""

import asyncio
import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm import weight_loader
from streamrl.messages import Rollout
from tests.engines.flight import start_engine
from tests.engines.tiny_qwen import (
    MAX_LENGTH,
    fill,
    forward_logprobs,
    prompt,
    save,
    weights_of,
    worst_error,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.xdist_group("engines"),
    pytest.mark.usefixtures("no_engine"),
]

PROMPT = prompt(5, 14, 6, 18, 7, 9)
#: Vocabularies of 50 are padded to 64 in vLLM.
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, 64),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, 64),
    "llama": (LlamaConfig, LlamaForCausalLM, 50),
}
QUICK = [("qwen2", True)]
"""`test_generation_engine.py` covers untied Qwen2. Each other family needs a vLLM process."""
GROUPS = {
    "embeddings": "embed_tokens",
    "q, k and v": r"[qkv]_proj\.weight",
    "q weights": r"q_proj\.weight",
    "k weights": r"k_proj\.weight",
    "v weights": r"v_proj\.weight",
    "biases of q, k and v": r"[qkv]_proj\.bias",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norms of layers": "layernorm",
    "the last norm": r"model\.norm",
    "norms of q and k": "[qk]_norm",
    "head": "lm_head",
}
COMMON_GROUPS = GROUPS.keys() - {"biases of q, k and v", "norms of q and k", "head"}


def family_model(family: str, *, tied: bool) -> PreTrainedModel:
    config_class, model_class, vocab_size = FAMILIES[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = model_class(config)
    fill(model, seed=1)
    return model.eval()


@torch.no_grad()
def change_group(model: PreTrainedModel, pattern: str) -> PreTrainedModel | None:
    """Return the model with other values in a group of parameters; None if it has no such group."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    group_parameters = [p for name, p in model.named_parameters() if re.search(pattern, name)]
    for parameter in group_parameters:
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model if group_parameters else None


def measure_logprob_difference(
    model: PreTrainedModel, other_model: PreTrainedModel, rollouts: list[Rollout]
) -> float:
    return max(
        float(np.abs(forward_logprobs(model, r) - forward_logprobs(other_model, r)).max())
        for r in rollouts
    )


CONFIG = GeneratorConfig(max_new_tokens=12)


async def check_each_group(engine: GenerationEngine, base: PreTrainedModel) -> None:
    """Change each group of parameters in turn while rollouts run; check that samples follow."""
    models: dict[int, PreTrainedModel] = {0: base}
    await engine.load_weights(weights_of(base), 0)
    running = asyncio.create_task(engine.generate(PROMPT, seeds=range(2), max_new_tokens=500))
    tested_groups = set()
    for group, pattern in GROUPS.items():
        model = change_group(models[max(models)], pattern)
        if model is None:
            continue
        tested_groups.add(group)
        version = max(models) + 1
        models[version] = model
        await engine.load_weights(weights_of(model), version)
        fresh = await engine.generate(PROMPT, seeds=range(4))
        assert measure_logprob_difference(model, models[version - 1], fresh) > 1e-2, group
        assert worst_error(fresh, models) < 1e-4, group
    assert tested_groups >= COMMON_GROUPS
    rollouts = await running
    assert len(np.unique(rollouts[0].policy_version)) > 3
    # The models have ever larger weights: of a thousand tokens, rounding in float32 puts some 1e-4
    # off; a group that was not loaded differs a hundred times as much.
    assert worst_error(rollouts, models) < 1e-3


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(
            family,
            tied,
            id=f"{family}-{'tied' if tied else 'untied'}",
            marks=[] if (family, tied) in QUICK else [pytest.mark.slow],
        )
        for family in FAMILIES
        for tied in (True, False)
    ],
)
async def test_each_group_of_parameters_is_loaded(family: str, tied: bool, tmp_path: Path):
    base = family_model(family, tied=tied)
    async with start_engine(save(base, tmp_path, ends=False), CONFIG) as engine:
        await check_each_group(engine, base)


@pytest.mark.slow
async def test_each_group_of_parameters_is_loaded_through_reload_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_loader, "bind_parameters", lambda *args: [])
    base = family_model("qwen2", tied=True)
    async with start_engine(save(base, tmp_path, ends=False), CONFIG) as engine:
        await check_each_group(engine, base)
        loaded = await engine.load_weights(weights_of(base), 100)
        assert loaded.copied_bytes >= num_bytes(weights_of(base))


def num_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.slow
async def test_large_layers_use_onednn_and_bfloat16_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_loader, "MIN_ONEDNN_ELEMENTS", 1)
    base = family_model("qwen2", tied=True)
    folder = save(base, tmp_path, ends=False)
    async with start_engine(folder, CONFIG) as engine:
        await engine.load_weights(weights_of(base), 0)
        assert worst_error(await engine.generate(PROMPT, seeds=range(4)), {0: base}) < 1e-4
    async with start_engine(folder, replace(CONFIG, dtype="bfloat16")) as engine:
        # Float32 tensors cannot be aliased: they are copied and rounded.
        loaded = await engine.load_weights(weights_of(base), 0)
        assert loaded.copied_bytes == num_bytes(weights_of(base)) // 2
        rollouts = await engine.generate(PROMPT, seeds=range(4))
        assert worst_error(rollouts, {0: base}) < 0.3
    from vllm import _custom_ops

    assert _custom_ops._supports_onednn, "vLLM's own setting is restored"
