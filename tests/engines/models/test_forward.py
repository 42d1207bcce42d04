"""Logprobs of a batch against a plain forward pass of each rollout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamrl.engines.models import forward
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.models.forward import (
    ModelLoadOptions,
    compute_token_logprobs,
    load_model,
)
from streamrl.errors import ConfigError
from tests.engines.tiny_families import COMMON
from tests.engines.tiny_qwen import save, tiny_model

NOISY = {
    "gpt2": {"resid_pdrop": 0.3, "n_layer": 2, "n_head": 4, "n_embd": 128},
    "opt": {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 96, "word_embed_proj_dim": 128},
    "biogpt": {"layerdrop": 0.5},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.3},
    "qwen2": {"attention_dropout": 0.5},
}


@pytest.mark.parametrize("family", NOISY)
def test_noise_of_training_mode_is_off_and_layers_are_recomputed(family, tmp_path):
    config = AutoConfig.for_model(family, **COMMON | NOISY[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32)
    ids = torch.arange(20)[None]
    plain = model(input_ids=ids).logits
    checkpoint_layers(model, offload=False, chunk_mlps=True)
    calls: list[None] = []
    layer = next(part for part in model.modules() if isinstance(part, GradientCheckpointingLayer))
    layer.register_forward_pre_hook(lambda *_: calls.append(None))
    for _ in range(2):
        scores = compute_token_logprobs(model, ids, ids >= 0, temperature=1.0)
        expected = plain.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(scores.logprobs[0, 1:], expected, atol=1e-5, rtol=0)
        scores.logprobs.sum().backward()
    assert len(calls) == 4


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_that_lacks_parameters_is_rejected(tmp_path, on_meta):
    path = Path(save(tiny_model(tied=True, seed=0), tmp_path))
    tensors = load_file(path / "model.safetensors")
    missing = next(name for name in tensors if "mlp" in name)
    for change in ({}, {missing: torch.zeros(3, 3)}):
        remaining = {name: tensor for name, tensor in tensors.items() if name != missing}
        save_file(remaining | change, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"model\.path=.*(lacks 1 parameters|mismatch)"):
            load_model(str(path), dtype=torch.float32, options=ModelLoadOptions(on_meta=on_meta))


@pytest.mark.parametrize("recompute", [False, True])
def test_flex_attention_uses_the_prefill_kernel_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool
):
    config = AutoConfig.for_model("gemma2", **COMMON, attn_logit_softcapping=50.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    kernel_options = []

    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        kernel_options.append(kwargs.get("kernel_options"))
        return query.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", attend)
    with monkeypatch.context() as while_loading:
        while_loading.setattr("torch.cuda.is_available", lambda: True)
        while_loading.setattr(forward, "get_local_device", lambda: torch.device("cpu"))
        model = load_model(str(tmp_path), dtype=torch.float32)
    if recompute:
        checkpoint_layers(model, offload=False, chunk_mlps=False)
    token_ids = torch.ones(1, 8, dtype=torch.int64)
    with torch.compiler.set_stance("force_eager"):  # of the mask
        scores = compute_token_logprobs(model, token_ids, token_ids > 0, temperature=1.0)
    scores.logprobs.sum().backward()
    assert kernel_options == [{"BACKEND": "TRITON"}] * (4 if recompute else 2)
