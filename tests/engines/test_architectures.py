"""Architectures that users bring: what vLLM samples from is what the trainer trains.

Tiny models with random weights, large enough that one that is missing, misplaced or left out moves
log-probabilities by whole nats.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from streamrl.engines.forward import ModelOptions, load_model, token_logprobs
from streamrl.weights.probe import Probe, probe_sequences
from tests.engines.test_weight_updates import started
from tests.engines.tiny_qwen import MAX_LENGTH, save, weights_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.xdist_group("engines"),
    pytest.mark.usefixtures("no_engine"),
]

LIMIT = 1e-3
VOCABULARY = 320
COMMON = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXED = ["sliding_attention", "full_attention"]
SHORT = MAX_LENGTH // 4
QUICK: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 96, "head_dim": 32},
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 32, "sliding_window": 16, "layer_types": MIXED},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    # vLLM builds it of the classes of transformers.
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
}
SLOW: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "qwen2": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "mistral": {"sliding_window": 16},
    "gemma": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    "phi3": {
        "original_max_position_embeddings": SHORT,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 16,
            "long_factor": [1.5 + 0.4 * i for i in range(16)],
        },
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "smollm3": {},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "qwen2_moe": {
        **EXPERTS,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "decoder_sparse_step": 1,
    },
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": None},
    "olmoe": EXPERTS,
    "granitemoe": LOCAL_EXPERTS,
    # Its router has biases, which are no parameters.
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "head_dim": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def make(architecture: str, folder: Path, *, seed: int) -> PreTrainedModel:
    """A model with random weights in a directory, as the trainer loads it."""
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
    options = ModelOptions(max_length=MAX_LENGTH)
    return load_model(str(folder), dtype=torch.float32, options=options).eval()


@torch.no_grad()
def probe_of(model: PreTrainedModel) -> Probe:
    sequences = probe_sequences(vocab_size=VOCABULARY, max_length=MAX_LENGTH)
    rows = [torch.from_numpy(sequence)[None].long() for sequence in sequences]
    scores = [token_logprobs(model, row, row >= 0, temperature=1.0).logprobs for row in rows]
    return Probe(sequences, [score[0].numpy() for score in scores], LIMIT)


@pytest.mark.parametrize(
    "architecture", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
async def test_the_generator_is_the_trainers_model_as_it_is_read_and_after_every_update(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = make(architecture, tmp_path, seed=1), tmp_path / "other"
    async with started(str(tmp_path), monkeypatch) as engine:
        # The trainer's is made beside the engine, as in a process that both share.
        for version, model in enumerate((base, make(architecture, other, seed=2), base)):
            # What is no parameter stays as it is in the directory.
            buffers = {n: b for n, b in base.named_buffers() if n in base.state_dict()}
            model.load_state_dict(buffers, strict=False)
            await engine.load_weights(weights_of(model), version)
            probe = probe_of(model)
            _, found = await engine.probe(probe.sequences)
            probe.check(found, f"{architecture}, with version {version},")
