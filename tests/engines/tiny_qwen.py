"""A random small Qwen2 with 64 tokens, on disk for vLLM and in memory to compare with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from streamrl.messages import Array, Rollout

VOCABULARY = 64
EOS = 2
MAX_LENGTH = 512


def tiny_model(
    *,
    tied: bool,
    seed: int,
    kv_heads: int = 1,
    vocabulary: int = VOCABULARY,
    eos: int = EOS,
    layers: int = 2,
) -> Qwen2ForCausalLM:
    """Build a float32 model with peaked distributions that differ from seed to seed."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=eos,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    fill(model, seed=seed)
    return model.eval()


@torch.no_grad()
def fill(model: PreTrainedModel, *, seed: int) -> None:
    """Initialize a model with large weights from a seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.15 * noise + (1 if name.endswith("norm.weight") else 0))


def endless_model(*, seed: int) -> Qwen2ForCausalLM:
    """Build an untied model that never samples EOS."""
    model = tiny_model(tied=False, seed=seed)
    bias_token(model, EOS, -100)
    return model


@torch.no_grad()
def bias_token(model: Qwen2ForCausalLM, token: int, weight: float) -> None:
    """Make a token likelier or less likely everywhere, by a constant direction of hidden states."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    model.model.norm.weight[0] = 1
    model.model.embed_tokens.weight[:, 0] = 4
    model.lm_head.weight[token, 0] = weight


def save(model: PreTrainedModel, folder: Path, *, ends: bool = True) -> str:
    """Write the model and a tokenizer of words t0 to t63; return the folder.

    Without `ends`, no token ends a completion.
    """
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=f"t{EOS}" if ends else None,
        bos_token="t1",
        pad_token="t0",
    )
    fast.save_pretrained(folder)
    return str(folder)


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return all parameters once; a tied lm_head goes by the embedding's name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def prompt(*token_ids: int) -> Array:
    """Token ids as a prompt."""
    return np.array(token_ids, np.int32)


@torch.no_grad()
def forward_logprobs(
    model: PreTrainedModel, rollout: Rollout, *, temperature: float = 1.0
) -> Array:
    """Return the logprob of each token under the model, [T]; 0 outside the loss mask."""
    token_ids = torch.from_numpy(rollout.token_ids).long()
    logits = model(token_ids[None]).logits[0, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1).gather(1, token_ids[1:, None])[:, 0]
    return np.where(rollout.loss_mask, np.concatenate([[0], logprobs.numpy()]), 0)


def worst_error(
    rollouts: Sequence[Rollout],
    models_by_version: Mapping[int, PreTrainedModel],
    *,
    temperature: float = 1.0,
) -> float:
    """Return the largest logprob error against the model of each token's version."""
    errors = [0.0]
    for rollout in rollouts:
        for version in np.unique(rollout.policy_version[rollout.loss_mask]):
            model = models_by_version[int(version)]
            expected = forward_logprobs(model, rollout, temperature=temperature)
            of_version = rollout.policy_version == version
            errors.append(np.abs(expected - rollout.generator_logprobs)[of_version].max())
    return float(max(errors))
