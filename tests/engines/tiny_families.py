"""Tiny random models of many families, and rows for them. Imports no pytest: ranks use them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.engines.tiny_qwen import MAX_LENGTH

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
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK = {
    **ROUTED_EXPERTS,
    "num_key_value_heads": 4,
    # vLLM's kernels support heads of this size only.
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def scaling(kind: str, factor: float) -> dict[str, Any]:
    """Return the rope scaling of a model that was trained with positions up to 128."""
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 128}


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
    # vLLM serves this family with transformers' classes.
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
}
SLOW: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_scaling": {
            **scaling("llama3", 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
    "qwen2": {"rope_scaling": scaling("yarn", 4.0)},
    "qwen3": {"head_dim": 32},
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
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 64},
    # The router of this family has biases, which are buffers.
    "glm4_moe": {**ROUTED_EXPERTS, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 128},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 32,
        "intermediate_size": 256,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "head_dim": 32,
        "mamba_chunk_size": 32,
    },
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 96,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 32,
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    **QUICK,
    **SLOW,
    # Multiplied logits; biased heads; other names of base and head.
    "cohere": {"logit_scale": 0.25},
    "gptj": {"n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 512},
    "phi": {},
    # Outputs, a decoder and attributes of the base that the code behind the head reads.
    "gemma4_text": {"head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0},
    # The output head is no child beside a base, so all logits are scored.
    "llama4_text": {"num_local_experts": 2, "head_dim": 32, "intermediate_size_mlp": 96},
}


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """Build a random model whose parameters all change its logits."""
    torch.manual_seed(0)
    options = {**COMMON, **FAMILIES[family], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() == 1 else 1.2 / math.sqrt(parameter.shape[-1])
            parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


def make_rows(lengths: tuple[int, ...], *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make token ids and attention mask [B, T] of random rows; the padding is random, too."""
    ids = torch.randint(
        3, VOCABULARY, (len(lengths), max(lengths)), generator=torch.manual_seed(seed)
    )
    return ids, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


class WidestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return output
