"""Checks of a model directory: can transformers train it and vLLM serve it with equal results?

The checks run before any actor starts and read only config and headers. The logprob checks of a
run catch further differences. Families: docs/models.md.
"""

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.models.forward import (
    NEXTN_LAYERS_KEY,
    VALUE_HEADS,
    choose_attention,
    load_skeleton,
    load_value_skeleton,
)
from streamrl.engines.models.packed_rows import explain_padding
from streamrl.engines.models.tensor_parallel import WHOLE_LOGITS
from streamrl.engines.models.tensor_parallel_support import EXPERT_COUNT_KEYS
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.files.hf_config import (
    LAYER_NUMBER_PATTERN,
    RECOMPUTED_TENSORS,
    read_model_config,
    read_num_layers,
    read_stored_shapes,
    read_stored_tensors,
)

TensorShapes = Mapping[str, tuple[int, ...]]
UNTRAINED_TENSORS = re.compile(
    rf"{RECOMPUTED_TENSORS.pattern}|(^|\.)mtp[_.]|^(score|v_head|value_head)\.|vision|visual"
)
"""Names of tensors that training ignores: recomputed buffers, MTP layers, value heads, vision."""
ADAPTER_FILE = "adapter_config.json"
FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")
"""safetensors dtypes of weights that are not quantized."""
POSITIVE_KEYS = (
    "rope_theta",
    "rope_local_base_freq",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Keys of config.json that must be above 0; otherwise the model computes NaN or zeros silently."""
RESAVE_ADVICE = "load the directory with transformers, save it, and train that"
QUANTIZED_ADVICE = (
    "quantized weights cannot be trained; load the directory with transformers, dequantized, save"
    " it, and train that"
)


def check_model_support(
    path: str,
    attention: str,
    *,
    section: str = "trainer",
    key: str = "model.path",
    is_served: bool = True,
) -> None:
    """Raise ConfigError unless transformers and vLLM support the model and compute the same.

    `path` is the model directory, which the config key `key` names. `attention` is the value of
    `<section>.attention`. With `is_served` False, as for a critic, vLLM need not support the model.
    """
    full_config = read_model_config(path)
    config = full_config.get_text_config()
    settings, stored = config.to_dict(), read_stored_shapes(Path(path), key)
    problem = _explain_quantized(settings)
    if is_served:
        problem = problem or _explain_unservable(full_config, is_part=config is not full_config)
        problem = problem or _explain_vllm_mismatch(config.model_type, settings, stored)
    if problem:
        raise ConfigError(f"{key}={path}: {problem}")
    if problem := _explain_wrong_attention(config.model_type, settings, attention):
        raise ConfigError(f"{section}.attention={attention}: {problem}")
    check_weight_files(path, key, is_served=is_served)


def describe_untrained_layers(path: str) -> list[str]:
    settings = read_model_config(path).get_text_config().to_dict()
    layers = _parse_layer_numbers(read_stored_shapes(Path(path), "model.path"))
    if not settings.get(NEXTN_LAYERS_KEY) or max(layers, default=0) < settings["num_hidden_layers"]:
        return []
    return [
        f"model.path={path}: {NEXTN_LAYERS_KEY}={settings[NEXTN_LAYERS_KEY]}: layers"
        " that predict several tokens at once are not trained, and left out of checkpoints"
    ]


def describe_forward(path: str, trainer: TrainerConfig, tokens: int, *, key: str) -> list[str]:
    """Describe what makes the forward pass of a model cost more; returns no line for most.

    `tokens` is the size of a micro-batch; `key` is as in `check_model_support`.
    """
    padding, whole_logits = _explain_forward(path, trainer.attention)
    notes = []
    if padding:
        notes.append(f"micro-batches are padded, not packed: {padding}")
    if whole_logits:
        size = resolve_trainer_dtype(trainer).itemsize
        gib = 2 * size * tokens * read_model_config(path).get_text_config().vocab_size / (1 << 30)
        notes.append(
            f"logits and their gradient take {gib:.2g} GiB per micro-batch of {tokens} tokens, as"
            f" they exist for all of them at once: {whole_logits}"
        )
    return [f"{key}={path}: {note}" for note in notes]


def check_packed_rows(path: str, attention: str, *, setting: str) -> None:
    """Raise ConfigError if rows of a model cannot be packed, which `setting` needs."""
    if reason := _explain_forward(path, attention)[0]:
        raise ConfigError(f"{setting}: needs packed rows, but {path} is padded: {reason}")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress log messages and progress bars of transformers in the block."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _explain_forward(path: str, attention: str) -> tuple[str, str]:
    """Explain why rows are padded, and why logits are whole; "" where they are not."""
    config = read_model_config(path)
    with silence_transformers():
        skeleton = load_skeleton(path)
    chosen = choose_attention(config, attention) or skeleton.config._attn_implementation
    return explain_padding(type(skeleton), config, chosen), vars(skeleton)[WHOLE_LOGITS]


def _explain_quantized(settings: Mapping[str, Any]) -> str:
    quantization = settings.get("quantization_config")
    if not quantization:
        return ""
    return f"quantization_config: {quantization.get('quant_method')} weights: {QUANTIZED_ADVICE}"


def _explain_unservable(config: Any, *, is_part: bool) -> str:
    """Explain why vLLM would serve another class than transformers trains; "" if it would not.

    is_part: the language model is a part of a larger model, such as a vision-language model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if is_part and importlib.util.find_spec("torchvision") is None:
        return (
            f"model_type={config.model_type}: a model of more than text, which vLLM serves with"
            " torchvision only; load its language model with transformers, save it, and train that"
        )
    served = (config.architectures or [""])[0]
    trained = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    if not served or not trained or served == trained or served.endswith("Model"):
        return ""
    return (
        f'config.json: architectures=["{served}"]: must be ["{trained}"], the class that is'
        " trained, for vLLM to serve it"
    )


def _explain_vllm_mismatch(family: str, settings: Mapping[str, Any], stored: TensorShapes) -> str:
    """Explain which setting of config.json vLLM ignores or rejects; "" if none."""
    has_window = bool(settings.get("use_sliding_window"))
    layer_types, clip_qkv = set(settings.get("layer_types") or ()), settings.get("clip_qkv")
    heads, kv_heads = (settings.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    unprefixed = next((name for name in stored if name.startswith("layers.")), "")
    top_k = settings.get("num_experts_per_tok")
    experts = next(filter(None, map(settings.get, EXPERT_COUNT_KEYS)), None)
    biased = next((name for name in stored if name.endswith("self_attn.o_proj.bias")), "")
    rules = {
        "max_window_layers: vLLM takes a sliding window for all layers or none": (
            family in ("qwen2", "qwen3") and len(layer_types) > 1 and has_window
        ),
        "use_sliding_window=true: vLLM leaves the window of this family out": (
            family in ("qwen2_moe", "qwen3_moe") and has_window
        ),
        "tie_word_embeddings=false: vLLM has no separate head for this family": (
            family == "gemma2" and not settings.get("tie_word_embeddings")
        ),
        f"num_experts_per_tok={top_k}: must be from 1 to the number of experts, {experts}": bool(
            experts and top_k is not None and not 0 < top_k <= experts
        ),
        f"num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}": bool(
            heads and kv_heads and heads % kv_heads
        ),
        f"its files have {unprefixed}, a name that vLLM does not take; {RESAVE_ADVICE}": bool(
            unprefixed
        ),
        f"clip_qkv={clip_qkv}: vLLM does not clip": family == "olmoe" and bool(clip_qkv),
        f"attention_bias=true: vLLM has no parameter for {biased}": (
            family in ("qwen3", "qwen3_moe") and bool(biased)
        ),
    }
    return next((text for text, applies in rules.items() if applies), "")


def _explain_wrong_attention(family: str, settings: Mapping[str, Any], attention: str) -> str:
    if attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "needs the package flash-attn, which is not installed; auto does without"
    if attention == "sdpa" and settings.get("attn_logit_softcapping"):
        return "ignores attention logit soft-capping, which vLLM applies; use auto"
    if attention in ("sdpa", "flash") and family == "gpt_oss":
        return "ignores the attention sinks of this family; use auto"
    return ""


def check_weight_files(path: str, key: str, *, is_served: bool = True) -> None:
    """Raise ConfigError unless a directory's tensors match the model of its config.json.

    Compares with transformers' class on the meta device. With `is_served` False, as for a critic,
    the output head may be missing.
    """
    if (Path(path) / ADAPTER_FILE).exists():
        raise ConfigError(
            f"{key}={path}: {ADAPTER_FILE}: transformers would put an adapter on the model, vLLM"
            " would not; move it elsewhere"
        )
    tensors = read_stored_tensors(Path(path), key)
    for name, tensor in tensors.items():
        if name.endswith("weight") and tensor.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{key}={path}: {name} is stored as {tensor.dtype}: {QUANTIZED_ADVICE}"
            )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    num_layers, last = read_num_layers(Path(path)), max(_parse_layer_numbers(shapes), default=-1)
    if 0 <= last < num_layers - 1:
        raise ConfigError(
            f"{key}={path}: its files hold {last + 1} layers, config.json says {num_layers}"
        )
    _check_positive(path, key, read_model_config(path).get_text_config().to_dict())
    if problem := _load_on_meta(path, shapes, is_served=is_served):
        raise ConfigError(f"{key}={path}: {problem}")


def _check_positive(path: str, key: str, settings: Mapping[str, Any]) -> None:
    rope = settings.get("rope_parameters") or {}
    has_windows = "sliding_attention" in (settings.get("layer_types") or ["sliding_attention"])
    names = (*POSITIVE_KEYS, "sliding_window") if has_windows else POSITIVE_KEYS
    for section in (settings, rope, *(value for value in rope.values() if isinstance(value, dict))):
        for name in names:
            value = section.get(name)
            is_number = isinstance(value, int | float) and 0 < value < math.inf
            if value is not None and not is_number:
                raise ConfigError(
                    f"{key}={path}: config.json: {name}={value!r}: must be a number above 0"
                )


def _load_on_meta(path: str, shapes: TensorShapes, *, is_served: bool) -> str:
    """Load tensors of these shapes on the meta device, as a trial; explain the first mismatch."""
    load = load_skeleton if is_served else load_value_skeleton
    try:
        with silence_transformers():
            skeleton = load(path)
            _, loading_info = type(skeleton).from_pretrained(
                None,
                config=skeleton.config,
                state_dict={name: torch.empty(s, device="meta") for name, s in shapes.items()},
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    # Without memory, the config is not at fault.
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - model classes raise any type for wrong settings
        return _explain_load_failure(error, "policy" if is_served else "critic")
    if mismatched := loading_info["mismatched_keys"]:
        name, shape, expected = min(mismatched)
        return f"{name} has shape {tuple(shape)} in its files, {tuple(expected)} by config.json"
    settings = skeleton.config.get_text_config()
    num_layers, num_extra = settings.num_hidden_layers, vars(settings).get(NEXTN_LAYERS_KEY) or 0
    extra_layers = {number for number in _parse_layer_numbers(shapes) if number >= num_layers}
    if len(extra_layers) > num_extra:
        return f"its files hold {max(extra_layers) + 1} layers, config.json says {num_layers}"
    unexpected = sorted(
        name
        for name in loading_info["unexpected_keys"]
        # A critic replaces other heads by its own; vLLM rejects tensors that it does not know.
        if not (RECOMPUTED_TENSORS if is_served else UNTRAINED_TENSORS).search(name)
        and _parse_layer_numbers([name]).isdisjoint(extra_layers)
        and (is_served or LAYER_NUMBER_PATTERN.search(name))
    )
    missing = [
        n for n in loading_info["missing_keys"] if is_served or not n.startswith(VALUE_HEADS)
    ]
    # If a parameter is missing, so are those tied to it; name the untied one.
    tied = skeleton.all_tied_weights_keys
    lacking = sorted(missing, key=lambda name: (name in tied, name))
    problems = []
    if lacking:
        shape = tuple(skeleton.state_dict()[lacking[0]].shape)
        problems.append(f"lack {lacking[0]}, of shape {shape}")
    if unexpected:
        problems.append(f"hold {unexpected[0]}, which is not a parameter of the model")
    return f"its files {' and '.join(problems)}" if problems else ""


def _explain_load_failure(error: Exception, role: str) -> str:
    text = " ".join(str(error).split())
    if text.startswith("Unrecognized configuration class"):
        return f"config.json: transformers has no class that makes a {role} of this family"
    if "automatic conversion" in text:
        return "its files lack a tensor of the experts, or have one of another shape than the rest"
    return f"config.json: transformers makes no such model: {type(error).__name__}: {text[:300]}"


def _parse_layer_numbers(names: Iterable[str]) -> set[int]:
    matches = (
        LAYER_NUMBER_PATTERN.search(name) for name in names if not UNTRAINED_TENSORS.search(name)
    )
    return {int(match[1]) for match in matches if match}
