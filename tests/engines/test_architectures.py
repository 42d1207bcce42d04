"""Architectures: vLLM samples from the model that the trainer trains.

Models are tiny and random, with weights so large that a missing or misplaced parameter changes
logprobs by whole nats.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.models.forward import (
    ModelLoadOptions,
    compute_token_logprobs,
    load_model,
    load_skeleton,
)
from streamrl.engines.models.lora import find_lora_layers
from streamrl.engines.training.model_trainer import write_hf_model
from streamrl.errors import LogprobCheckError
from streamrl.files.hf_config import read_stored_shapes
from streamrl.weights.config import EXACT_LOGPROB_LIMIT, ROUNDED_LOGPROB_LIMIT
from streamrl.weights.parameters import LORA_A_SUFFIX, LORA_B_SUFFIX, LORA_SCALE
from streamrl.weights.versions import LogprobCheck, make_check_sequences
from tests.engines.flight import start_engine
from tests.engines.tiny_families import COMMON, QUICK, SLOW, VOCABULARY
from tests.engines.tiny_qwen import MAX_LENGTH, save, weights_of

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.usefixtures("no_engine")]

RANK = 2
WITHOUT_LORA = ("gpt2",)
"""Families whose layers are no linear layers of torch."""


def make_model(architecture: str, folder: Path, *, seed: int) -> PreTrainedModel:
    """Save a randomly initialized model and return the trainer's copy."""
    settings = {**COMMON, **(QUICK | SLOW)[architecture]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(values.shape, generator=generator)
            if "e_score_correction_bias" in name or (values.dim() == 1 and "inv_freq" not in name):
                values.add_(noise * 0.2)
            elif "embed" in name:
                values.copy_(noise)
            elif values.dim() > 1:
                values.copy_(noise * 1.6 / math.sqrt(max(values.shape[-2:])))
    save(model, folder, ends=False)
    options = ModelLoadOptions(max_length=MAX_LENGTH)
    return load_model(str(folder), dtype=torch.float32, options=options).eval()


@torch.no_grad()
def make_logprob_check(model: PreTrainedModel, limit: float) -> LogprobCheck:
    sequences = make_check_sequences(vocab_size=VOCABULARY, max_length=MAX_LENGTH)
    rows = [torch.from_numpy(sequence)[None].long() for sequence in sequences]
    scores = [compute_token_logprobs(model, row, row >= 0, temperature=1.0) for row in rows]
    return LogprobCheck(sequences, [score.logprobs[0].numpy() for score in scores], limit)


async def check_logprobs(engine: GenerationEngine, model: PreTrainedModel, context: str) -> None:
    """Raise LogprobCheckError unless engine and model compute equal logprobs."""
    check = make_logprob_check(model, EXACT_LOGPROB_LIMIT)
    check.compare_logprobs(await engine.compute_logprobs(check.sequences), context)


def add_adapters(model: PreTrainedModel, folder: str) -> dict[str, torch.Tensor]:
    """Return adapters for every layer that LoRA targets, as published; merge them into the model.

    `folder` has the model.
    """
    generator = torch.Generator().manual_seed(3)
    published = {LORA_SCALE: torch.tensor(0.5)}
    for name in find_lora_layers(load_skeleton(folder)):
        layer = model.get_submodule(name)
        assert isinstance(layer, torch.nn.Linear)
        a = torch.randn(RANK, layer.in_features, generator=generator) * 0.1
        b = torch.randn(layer.out_features, RANK, generator=generator) * 0.1
        published |= {name + LORA_A_SUFFIX: a, name + LORA_B_SUFFIX: b}
        with torch.no_grad():
            layer.weight += 0.5 * b @ a
    return published


ARCHITECTURES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt_oss", "gpt_neox")))
    for name in QUICK | SLOW
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.asyncio(loop_scope="session")
async def test_the_generator_equals_the_trainers_model_initially_and_after_updates(
    architecture: str, tmp_path: Path
):
    base, other_path = make_model(architecture, tmp_path, seed=1), tmp_path / "other"
    async with start_engine(str(tmp_path), GeneratorConfig(max_new_tokens=12)) as engine:
        # Build the trainer's model beside the engine, as in a colocated process.
        for version, model in enumerate((base, make_model(architecture, other_path, seed=2))):
            # Buffers keep the values of the directory.
            buffers = {n: b for n, b in base.named_buffers() if n in base.state_dict()}
            model.load_state_dict(buffers, strict=False)
            loaded = await engine.load_weights(weights_of(model), version)
            assert loaded.verification.num_compared and not loaded.verification.differing_names
            assert not loaded.verification.warnings
            await check_logprobs(engine, model, f"{architecture}, with version {version},")
        if architecture in WITHOUT_LORA:
            return
        # Adapters change the weights of the directory, not those of the version before.
        await engine.load_weights(add_adapters(base, str(tmp_path)), 2)
        await check_logprobs(engine, base, f"{architecture}, with adapters,")


def roll(parameter: torch.Tensor) -> None:
    parameter.copy_(parameter.roll(1, 0))


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "rope scaling": ("llama", lambda model: model.model.rotary_emb.inv_freq.mul_(0.5)),
    "no soft-capping": (
        "gemma2",
        lambda model: vars(model.config).update(final_logit_softcapping=None),
    ),
    "stale layer": ("qwen2", lambda model: roll(model.model.layers[1].self_attn.q_proj.weight)),
    "swapped experts": (
        "qwen3_moe",
        lambda model: roll(model.model.layers[1].mlp.experts.down_proj),
    ),
    "epsilon of a norm": (
        "qwen3",
        lambda model: vars(model.model.norm).update(variance_epsilon=10.0),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@torch.no_grad()
def test_the_check_tells_faults_from_rounding_to_bfloat16(fault: str, tmp_path: Path):
    family, break_model = FAULTS[fault]
    check = make_logprob_check(make_model(family, tmp_path, seed=1), ROUNDED_LOGPROB_LIMIT)
    options = ModelLoadOptions(max_length=MAX_LENGTH)
    rounded = load_model(str(tmp_path), dtype=torch.bfloat16, options=options)
    theirs = make_logprob_check(rounded, ROUNDED_LOGPROB_LIMIT).logprobs
    check.compare_logprobs(theirs, "generator")
    break_model(rounded)
    theirs = make_logprob_check(rounded, ROUNDED_LOGPROB_LIMIT).logprobs
    with pytest.raises(LogprobCheckError, match="do not compute the same model"):
        check.compare_logprobs(theirs, "generator")


def test_docs_list_exactly_the_tested_architectures():
    page = Path("docs/models.md").read_text()
    table = page.partition("## Architectures")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(QUICK | SLOW)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_has_the_trained_weights_in_the_original_layout(
    architecture: str, tmp_path: Path
):
    make_model(architecture, tmp_path / "base", seed=1)
    base = load_model(str(tmp_path / "base"), dtype=torch.float32)
    with torch.no_grad():
        trained = {name: 2 * tensor for name, tensor in weights_of(base).items()}
    write_hf_model(tmp_path / "saved", base, trained.items(), tokenizer_from=str(tmp_path / "base"))
    read = load_model(str(tmp_path / "saved"), dtype=torch.float32)
    saved_weights, buffers = weights_of(read), dict(base.named_buffers())
    assert saved_weights.keys() == trained.keys()
    assert all(torch.equal(saved_weights[name], tensor) for name, tensor in trained.items())
    assert all(torch.equal(b, buffers[name]) for name, b in read.named_buffers())
    layout, saved = (read_stored_shapes(tmp_path / folder, "path") for folder in ("base", "saved"))
    assert saved == layout
