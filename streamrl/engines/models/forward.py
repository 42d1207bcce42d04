"""Load transformers models; compute token logprobs, entropies and values."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from streamrl.distributed.devices import get_local_device, has_local_gpu
from streamrl.engines.models.chunked_head import (
    EntropyMode,
    NextTokenScores,
    ScoringOutput,
    TopWords,
    mark_whole_logits,
    run_scoring_forward,
)
from streamrl.engines.models.packed_rows import RowLayout, enable_packing, unwrap_engine
from streamrl.engines.models.router_replay import Routing
from streamrl.errors import ConfigError, get_message
from streamrl.files.hf_config import is_trusted, read_model_config

FLEX_ATTENTION = "flex_attention"
NEXTN_LAYERS_KEY = "num_nextn_predict_layers"
"""Key in config.json of the number of multi-token prediction layers."""
VALUE_HEADS = ("score.", "classifier.")
"""Name prefixes of value heads in transformers' token classification models."""


@dataclass(frozen=True)
class ModelLoadOptions:
    """Options that make transformers compute the same as vLLM with the same weights.

    attention: trainer.attention. max_length: length of the longest rollout in
    tokens, prompt included, by which vLLM selects LongRoPE factors. With max_length None,
    transformers selects the factors by the length of each batch. keeps_layers_on_host: leave the
    model in host memory, for `layer_offload.keep_layers_on_host`. key: config key that names the
    directory, for messages. on_meta: leave the tensors in the directory's files on the meta device,
    for `StoredWeights`; others are computed as usual.
    """

    attention: str = "auto"
    max_length: int | None = None
    keeps_layers_on_host: bool = False
    key: str = "model.path"
    on_meta: bool = False


DEFAULT_OPTIONS = ModelLoadOptions()


class TokenScores(NamedTuple):
    """Log-probabilities of tokens and entropies of their distributions, float32 [B, T].

    word_logprobs, word_ids: of further words in the place of each token, [B, T, W]. All are 0 at
    position 0 and in the padding. routing: the experts, if they were replayed.
    """

    logprobs: Tensor
    entropy: Tensor
    word_logprobs: Tensor | None = None
    word_ids: Tensor | None = None
    routing: Routing | None = None


def load_model(
    path: str, *, dtype: torch.dtype, options: ModelLoadOptions = DEFAULT_OPTIONS
) -> PreTrainedModel:
    """Load the causal language model of a Hugging Face directory, in evaluation mode.

    Trainers stay in it: with dropout or a router's noise, the trained policy would differ from the
    sampling policy. Raises ConfigError if parameters are missing or misshapen; transformers would
    initialize them randomly.
    """
    config = read_model_config(path)
    model, missing = _load_pretrained(AutoModelForCausalLM, path, config, dtype, options)
    _check_complete(path, missing, options)
    mark_whole_logits(model)
    return _move_to_local_device(model, options)


def load_skeleton(path: str) -> PreTrainedModel:
    """Build the causal language model of a directory on the meta device, without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            read_model_config(path), trust_remote_code=is_trusted(path)
        )
    mark_whole_logits(model)
    return model


def load_value_skeleton(path: str) -> PreTrainedModel:
    """Build a critic's model on the meta device: that of `load_value_model`, without weights."""
    with torch.device("meta"):
        return AutoModelForTokenClassification.from_config(
            read_model_config(path, num_labels=1), trust_remote_code=is_trusted(path)
        )


def _load_pretrained(
    auto_class: Any, path: str, config: Any, dtype: torch.dtype, options: ModelLoadOptions
) -> tuple[Any, list[str]]:
    """Load a model; return it and its missing parameters."""
    disable_progress_bar()
    if vars(config.get_text_config()).get(NEXTN_LAYERS_KEY):
        # transformers does not implement these layers and omits them from checkpoints.
        setattr(config.get_text_config(), NEXTN_LAYERS_KEY, 0)
    try:
        model, info = auto_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=choose_attention(config, options.attention),
            output_loading_info=True,
            trust_remote_code=is_trusted(path),
            device_map={"": "meta"} if options.on_meta else None,
        )
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        reason = f"cannot be loaded: {get_message(error):.500}"
        raise ConfigError(f"{options.key}={path}: {reason}") from error
    missing = sorted(info["missing_keys"])
    if options.on_meta:
        _initialize_unstored(model, missing)
    _fix_longrope_factors(model, options.max_length)
    if model.config.get_text_config()._attn_implementation == FLEX_ATTENTION and has_local_gpu():
        model.register_forward_pre_hook(_force_prefill_kernel, with_kwargs=True)
    enable_packing(model)
    return model, missing


def _initialize_unstored(model: Any, missing: Collection[str]) -> None:
    """Initialize the tensors of a model on the meta device that no file stores, on the CPU.

    These are rotary frequencies and a new value head: the same bits, and draws of the random number
    generator, as without the meta device.
    """
    state = model.state_dict()
    unstored = [name for name, _ in model.named_buffers() if name not in state]
    for name in (*unstored, *missing):
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        value = torch.empty_like(getattr(module, attribute), device="cpu")
        setattr(module, attribute, value if name in unstored else torch.nn.Parameter(value))
        # Falcon-H1's model computes a buffer of its layers.
        for end in range(name.count(".") + 1):
            owner = model.get_submodule(".".join(name.split(".")[:end]))
            owner._is_hf_initialized = False
    model.initialize_weights()


def _move_to_local_device(model: Any, options: ModelLoadOptions) -> Any:
    """Move a model to this process's device, except its tensors on the meta device."""
    device = torch.device("cpu") if options.keeps_layers_on_host else get_local_device()
    return model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def choose_attention(config: Any, setting: str) -> str | None:
    """Return transformers' name of the attention implementation; None lets transformers choose."""
    softcap = config.get_text_config().to_dict().get("attn_logit_softcapping")
    if setting == "auto" and softcap:
        # transformers' other implementations silently ignore soft-capping.
        return FLEX_ATTENTION if has_local_gpu() else "eager"
    return None if setting == "auto" else setting


def _force_prefill_kernel(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make flex attention use its prefill kernel for short sequences, too.

    Below 128 tokens torch selects the decoding kernel, which does not compile with the default
    block size of the mask.
    """
    return args, {"kernel_options": {"BACKEND": "TRITON"}, **kwargs}


def _fix_longrope_factors(model: Any, max_length: int | None) -> None:
    """Select LongRoPE's factors by the longest rollout, as vLLM does, not by each batch."""
    for module in model.modules():
        if vars(module).get("rope_type") != "longrope" or max_length is None:
            continue
        original = module.config.rope_parameters["original_max_position_embeddings"]
        if max_length > original:
            init = ROPE_INIT_FUNCTIONS["longrope"]
            module.inv_freq, _ = init(module.config, module.inv_freq.device, seq_len=max_length)
            module.original_inv_freq = module.inv_freq.clone()


def _check_complete(
    path: str,
    missing: list[str],
    options: ModelLoadOptions,
    headless: PreTrainedModel | None = None,
) -> None:
    """Raise ConfigError if parameters are missing; those of a head of `headless` become 0."""
    if headless is not None:
        head = {n: p for n, p in headless.named_parameters() if n.startswith(VALUE_HEADS)}
        if head.keys() & missing:
            for parameter in head.values():
                nn.init.zeros_(parameter)
        missing = [name for name in missing if name not in head]
    if missing:
        first = ", ".join(missing[:3])
        raise ConfigError(f"{options.key}={path}: lacks {len(missing)} parameters, such as {first}")


def load_value_model(
    path: str, *, dtype: torch.dtype, options: ModelLoadOptions = DEFAULT_OPTIONS
) -> PreTrainedModel:
    """Load a critic: the directory's model with a value head (a scalar per token) as its only head.

    If the directory is a critic's checkpoint, its value head is loaded; otherwise the head starts
    at 0, so a new critic predicts 0. ConfigError is that of `load_model`.
    """
    config = read_model_config(path, num_labels=1)
    model, missing = _load_pretrained(AutoModelForTokenClassification, path, config, dtype, options)
    _check_complete(path, missing, options, model)
    return _move_to_local_device(model, options)


def load_reward_model(
    path: str,
    *,
    dtype: torch.dtype,
    options: ModelLoadOptions = DEFAULT_OPTIONS,
    makes_head: bool = False,
) -> PreTrainedModel:
    """Load the sequence-classification model of a directory.

    Its head, of one label, is in the files; with `makes_head` one that is not starts at 0. A
    decoder returns the logits of all tokens, [B, T, 1]: transformers' forward pass would find the
    last token of a row by the padding. ConfigError is that of `load_model`.
    """
    config = read_model_config(path, **({"num_labels": 1} if makes_head else {}))
    config.use_cache = False
    sizes = config.get_text_config()
    if sizes.pad_token_id not in range(sizes.vocab_size):
        sizes.pad_token_id = 0  # without one, or with -1, transformers refuses several rows
    model, missing = _load_pretrained(
        AutoModelForSequenceClassification, path, config, dtype, options
    )
    _check_complete(path, missing, options, model if makes_head else None)
    if scores_each_token(model):
        token_logits: list[Tensor] = []

        def replace_logits(_: Any, __: Any, output: Any) -> Any:
            output.logits = token_logits.pop()
            return output

        model.score.register_forward_hook(lambda _, __, logits: token_logits.append(logits))
        model.register_forward_hook(replace_logits)
    return _move_to_local_device(model, options)


def scores_each_token(model: PreTrainedModel) -> bool:
    """Return whether the head of a sequence-classification model reads each token, as decoders'."""
    return isinstance(dict(model.named_children()).get("score"), nn.Linear)


def compute_row_logits(
    model: Callable[..., Any], token_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    """Run a reward model and return the logit of each row, float32 [B].

    `token_ids` int64 [B, T], `attention_mask` bool [B, T]. Decoders have it at the last token.
    """
    if not scores_each_token(unwrap_engine(model)):
        output = model(input_ids=token_ids, attention_mask=attention_mask.long())
        return output.logits[:, 0].float()
    rows = RowLayout(model, token_ids, attention_mask)
    logits = rows.restore(rows.run_model().logits[..., 0].float())
    last = attention_mask.sum(-1, keepdim=True) - 1
    return logits.gather(1, last)[:, 0]


def compute_token_values(
    model: Callable[..., Any], token_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    """Run a critic and return the value of the state before each token, float32 [B, T].

    `token_ids` int64 [B, T], `attention_mask` bool [B, T]. The value at position t depends on the
    tokens before t, like the choice of token t. Position 0 and the padding have 0.
    """
    rows = RowLayout(model, token_ids, attention_mask)
    values = rows.restore(rows.run_model().logits[..., 0].float())
    return shift_right(values, attention_mask)


def compute_token_logprobs(  # noqa: PLR0913
    model: Callable[..., Any],
    token_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float,
    entropy_mode: EntropyMode = "none",
    sampling_mask: Tensor | None = None,
    words: Tensor | TopWords | None = None,
    routing: Routing | None = None,
) -> TokenScores:
    """Compute the logprob of every token given the tokens before, at the sampling temperature.

    `token_ids` int64 [B, T], `attention_mask` bool [B, T], padded on the right. Position t holds
    the logprob of token t; position 0 holds 0. Logits are divided by `temperature` as in sampling.
    Logits exist for a chunk of tokens at a time (`chunked_head`). Entropies are 0 for mode "none"
    and carry a gradient only for mode "gradient". `sampling_mask`, `words` and `routing` as in
    `run_scoring_forward`.
    """
    scores = run_scoring_forward(
        model,
        token_ids,
        attention_mask,
        temperature=temperature,
        entropy_mode=entropy_mode,
        sampling_mask=sampling_mask,
        words=words,
        routing=routing,
    )
    return shift_scores(scores, attention_mask)._replace(routing=routing)


def shift_scores(scores: NextTokenScores, attention_mask: Tensor) -> TokenScores:
    """Move scores of next tokens to the positions of these tokens."""
    logprobs, entropy = (shift_right(x, attention_mask) for x in (scores.logprobs, scores.entropy))
    word_logprobs, word_ids = (
        None if x is None else shift_right(x, attention_mask).movedim(0, -1)
        for x in (scores.word_logprobs, scores.word_ids)
    )
    return TokenScores(logprobs, entropy, word_logprobs, word_ids)


def shift_right(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Move predictions [..., B, T], made at the token before, to the position of the predicted one.

    Position 0 and the padding become 0.
    """
    shifted = torch.nn.functional.pad(values[..., :-1], (1, 0))
    return torch.where(attention_mask, shifted, 0.0)


def iter_layers(module: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the layers of a model; none of a family that does not name their class."""
    layer_classes = set(module._no_split_modules or ())
    return (layer for layer in module.modules() if type(layer).__name__ in layer_classes)


def load_two_headed_model(
    path: str, *, dtype: torch.dtype, options: ModelLoadOptions = DEFAULT_OPTIONS
) -> PreTrainedModel:
    """Load a directory's causal language model and add a value head initialized to 0.

    The value head's parameters have the same names as those of a separate critic. ConfigError is
    that of `load_model`.
    """
    model = load_model(path, dtype=dtype, options=options)
    add_value_head(model, dtype=dtype, device=get_local_device())
    for parameter in model.score.parameters():
        nn.init.zeros_(parameter)
    hidden_states: list[Tensor] = []

    def save_hidden(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        hidden_states.append(inputs[0])

    def add_values(module: Any, _: Any, output: Any) -> Any:
        results = {name: output.get(name) for name in ("logits", "scores")}
        return ScoringOutput(**results, state_values=module.score(hidden_states.pop()))

    # The output head's input is the last hidden state in every family, whatever its modules' names.
    model.get_output_embeddings().register_forward_pre_hook(save_hidden)
    model.register_forward_hook(add_values)
    return model


def add_value_head(
    model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Add a randomly initialized value head, a scalar per token, on `device` or the model's."""
    width = model.config.get_text_config().hidden_size
    model.score = torch.nn.Linear(width, 1, device=device or model.device, dtype=dtype)
