"""A policy's forward pass: the log-probability it gives to every token of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamrl.algorithms.math.losses import entropy_from_logits
from streamrl.engines.trainer_config import ATTENTION_IMPLEMENTATIONS
from streamrl.errors import ConfigError
from streamrl.files.hf_config import is_trusted, read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_TOKENS = 2048
"""Tokens whose distributions over the vocabulary are held in float32 at a time."""
FLEX_ATTENTION = ATTENTION_IMPLEMENTATIONS["flex"]
NEXTN_LAYERS_KEY = "num_nextn_predict_layers"
"""Setting of models with layers that predict several tokens at once."""
VALUE_HEAD_PREFIX = "score."
"""How the names of a value model's own parameters begin."""

EntropyMode = Literal["none", "value", "gradient"]


@dataclass(frozen=True)
class ModelLoadOptions:
    """How a model is built, so that it computes what vLLM computes with the same weights.

    attention: a key of ATTENTIONS. max_length: the most tokens of a rollout, prompt included, by
    which vLLM chooses the positions of some models; None leaves it to each rollout's own length.
    """

    attention: str = "auto"
    max_length: int | None = None


DEFAULT_OPTIONS = ModelLoadOptions()


class TokenScores(NamedTuple):
    """Log-probabilities and entropies, float32 [B, T]; 0 at position 0 and in the padding."""

    logprobs: Tensor
    entropy: Tensor


def get_local_device() -> torch.device:
    """The GPU this process works on, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def synchronize_device() -> None:
    """Until a GPU has done what it was given, for whoever goes on with it on another stream."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load_model(
    path: str, *, dtype: torch.dtype, options: ModelLoadOptions = DEFAULT_OPTIONS
) -> "PreTrainedModel":
    """The causal language model in a Hugging Face directory, in training mode, without dropout.

    Dropout would make the policy that is trained another one than the policy that sampled. Raises
    ConfigError if the directory lacks parameters or has them in another shape: transformers would
    go on with random ones.
    """
    from transformers import AutoModelForCausalLM

    config = read_model_config(path)
    model, missing = _load_pretrained(AutoModelForCausalLM, path, config, dtype, options)
    _check_complete(path, missing)
    return model.to(get_local_device()).train()


def load_skeleton(path: str) -> "PreTrainedModel":
    """The causal language model in a directory without its weights, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            read_model_config(path), trust_remote_code=is_trusted(path)
        )


def load_value_skeleton(path: str) -> "PreTrainedModel":
    """The model that `load_value_model` makes of a directory, likewise without its weights."""
    from transformers import AutoModelForTokenClassification

    with torch.device("meta"):
        return AutoModelForTokenClassification.from_config(
            read_model_config(path, num_labels=1), trust_remote_code=is_trusted(path)
        )


def _load_pretrained(
    kind: Any, path: str, config: Any, dtype: torch.dtype, options: ModelLoadOptions
) -> tuple[Any, list[str]]:
    """The model without dropout, and the names of the parameters the directory lacks."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if vars(config.get_text_config()).get(NEXTN_LAYERS_KEY):
        # transformers has no such layers, and writes none into a checkpoint.
        setattr(config.get_text_config(), NEXTN_LAYERS_KEY, 0)
    try:
        model, info = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=_choose_attention(config, options.attention),
            output_loading_info=True,
            trust_remote_code=is_trusted(path),
        )
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.path={path}: cannot be loaded: {reason[:500]}") from error
    _fix_longrope_factors(model, options.max_length)
    if (
        model.config.get_text_config()._attn_implementation == FLEX_ATTENTION
        and torch.cuda.is_available()
    ):
        model.register_forward_pre_hook(_force_prefill_kernel, with_kwargs=True)
    return model, sorted(info["missing_keys"])


def _choose_attention(config: Any, wanted: str) -> str | None:
    """Name transformers' attention; None leaves the choice to transformers."""
    capped = config.get_text_config().to_dict().get("attn_logit_softcapping")
    if wanted == "auto" and capped:
        # The others leave the cap out without a word.
        return FLEX_ATTENTION if torch.cuda.is_available() else "eager"
    return ATTENTION_IMPLEMENTATIONS[wanted]


def _force_prefill_kernel(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Have flex attention take its usual kernel for short rows, too.

    For fewer than 128 tokens it takes the one for decoding, which does not compile with blocks of a
    mask as large as they are by default.
    """
    return args, {"kernel_options": {"BACKEND": "TRITON"}, **kwargs}


def _fix_longrope_factors(model: Any, max_length: int | None) -> None:
    """Choose between the factors of LongRoPE once, by the longest rollout, as vLLM does.

    transformers chooses by the longest row of each batch.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if vars(module).get("rope_type") != "longrope" or max_length is None:
            continue
        original = module.config.rope_parameters["original_max_position_embeddings"]
        if max_length > original:
            init = ROPE_INIT_FUNCTIONS["longrope"]
            module.inv_freq, _ = init(module.config, module.inv_freq.device, seq_len=max_length)
            module.original_inv_freq = module.inv_freq.clone()


def _check_complete(path: str, missing: list[str]) -> None:
    if missing:
        first = ", ".join(missing[:3])
        raise ConfigError(f"model.path={path}: lacks {len(missing)} parameters, as {first}")


def load_value_model(
    path: str, *, dtype: torch.dtype, options: ModelLoadOptions = DEFAULT_OPTIONS
) -> "PreTrainedModel":
    """A model with a value for every token: the body of the one in a directory, and a head.

    The head starts at 0 unless the directory has one (it is a critic's checkpoint), so that a new
    critic begins by expecting nothing. Raises ConfigError as `load_model` does.
    """
    from transformers import AutoModelForTokenClassification

    config = read_model_config(path, num_labels=1)
    # Left out, transformers takes it for a tenth.
    config.classifier_dropout = 0.0
    model, missing = _load_pretrained(AutoModelForTokenClassification, path, config, dtype, options)
    head = {name for name, _ in model.named_parameters() if name.startswith(VALUE_HEAD_PREFIX)}
    _check_complete(path, [name for name in missing if name not in head])
    if head.intersection(missing):
        with torch.no_grad():
            for parameter in model.score.parameters():
                parameter.zero_()
    return model.to(get_local_device()).train()


def compute_token_values(
    model: Callable[..., Any], token_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    """What is expected of the rest of a rollout before each of its tokens: float32 [B, T].

    Position t sees the tokens before t, as the choice of token t does; 0 at position 0 and in the
    padding.
    """
    output = run_causal_forward(model, token_ids)
    return shift_right(output.logits[..., 0].float(), attention_mask)


def run_causal_forward(model: Callable[..., Any], token_ids: Tensor) -> Any:
    """Run a causal model on rows that are padded on the right, without an attention mask.

    No token attends to what follows it, so padding changes nothing before it. Without a mask
    attention takes its causal kernel, which skips the pairs that a mask would only hide: 3 to 4 %
    of a training step on the CPU.
    """
    return model(input_ids=token_ids, use_cache=False)


def compute_token_logprobs(
    model: Callable[..., Any],
    token_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float,
    entropy_mode: EntropyMode = "none",
) -> TokenScores:
    """Log-probability of every token given those before it, at the sampling temperature.

    `token_ids` int64 [B, T] and `attention_mask` bool [B, T] with the padding on the right.
    Position t holds the log-probability of token t; the first has none. Logits are divided by
    `temperature` as they were when the token was sampled. The float32 distributions are made chunk
    by chunk, in the backward pass again. Entropies are 0 unless asked for, and have a gradient only
    if that is asked for.
    """
    return score_tokens(
        run_causal_forward(model, token_ids).logits,
        token_ids,
        attention_mask,
        temperature=temperature,
        entropy_mode=entropy_mode,
    )


def score_tokens(
    logits: Tensor,
    token_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float,
    entropy_mode: EntropyMode = "none",
) -> TokenScores:
    """What `compute_token_logprobs` says, of the logits [B, T, V] of a forward pass."""
    # Splitting all of it and dropping the last position of the small result keeps the backward
    # pass at one concatenation; a slice of the logits would be padded back to full size.
    targets = token_ids.roll(-1, dims=1)
    width = max(1, CHUNK_TOKENS // len(token_ids))
    pairs = zip(logits.split(width, dim=1), targets.split(width, dim=1), strict=True)
    chunks = [
        checkpoint(
            _score_chunk,
            part,
            ids,
            temperature,
            entropy_mode,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for part, ids in pairs
    ]
    logprobs, entropies = (torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True))
    return TokenScores(
        shift_right(logprobs, attention_mask), shift_right(entropies, attention_mask)
    )


def _score_chunk(
    logits: Tensor, targets: Tensor, temperature: float, entropy_mode: EntropyMode
) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)
    if entropy_mode == "none":
        return chosen, torch.zeros_like(chosen)
    with torch.set_grad_enabled(entropy_mode == "gradient" and torch.is_grad_enabled()):
        return chosen, entropy_from_logits(scaled)


def shift_right(values: Tensor, attention_mask: Tensor) -> Tensor:
    """From "what position t says of the next token" to "what was said of token t"."""
    shifted = torch.nn.functional.pad(values[:, :-1], (1, 0))
    return torch.where(attention_mask, shifted, 0.0)
