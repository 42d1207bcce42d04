"""What a model directory alone says that trainer and generator cannot do, or not alike.

All of it is told before anything starts; what else there is, the probes of a run find. Families:
docs/models.md.
"""

import importlib.util
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from streamrl.engines.models.forward import (
    NEXTN_LAYERS_KEY,
    VALUE_HEAD_PREFIX,
    load_skeleton,
    load_value_skeleton,
)
from streamrl.errors import ConfigError
from streamrl.files.hf_config import (
    LAYER_NUMBER_PATTERN,
    RECOMPUTED_TENSORS,
    read_model_config,
    read_num_layers,
    read_stored_shapes,
    read_stored_tensors,
    silence_transformers,
)

TensorShapes = Mapping[str, tuple[int, ...]]
UNTRAINED_TENSORS = re.compile(
    rf"{RECOMPUTED_TENSORS.pattern}|(^|\.)mtp[_.]|^(score|v_head|value_head)\.|vision|visual"
)
"""Tensors that a model computes anew, or predicts several tokens with; other heads, and eyes."""
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
ADAPTER_FILE = "adapter_config.json"
FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")
"""Types of numbers, by their names in safetensors, that are weights as they are."""
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
"""Settings with which a model computes nothing, and says nothing, unless they are above 0."""
PLAIN_DTYPES = ("None", "float16", "bfloat16", "float32")
RESAVE_ADVICE = "load the directory with transformers, save it, and train that"
QUANTISED_ADVICE = (
    "quantised weights cannot be trained; load the directory with transformers, dequantized, save"
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
    """Raise ConfigError, with the reason, for a model that cannot be trained and served alike.

    `attention` is the setting of this name in a trainer's section, `key` names the directory. A
    critic is not served: vLLM need not take it.
    """
    whole = read_model_config(path)
    config = whole.get_text_config()
    settings, stored = config.to_dict(), read_stored_shapes(Path(path), key)
    problem = _explain_quantised(settings)
    if is_served:
        problem = problem or _explain_unservable(whole, is_part=config is not whole)
        problem = problem or _explain_vllm_mismatch(config.model_type, settings, stored)
    if problem:
        raise ConfigError(f"{key}={path}: {problem}")
    if problem := _explain_wrong_attention(config.model_type, settings, attention):
        raise ConfigError(f"{section}.attention={attention}: {problem}")
    check_weight_files(path, key, is_served=is_served)


def describe_untrained_layers(path: str) -> list[str]:
    """Say what of a model is not trained, and will not be in its checkpoints."""
    settings = read_model_config(path).get_text_config().to_dict()
    layers = _parse_layer_numbers(read_stored_shapes(Path(path), "model.path"))
    if not settings.get(NEXTN_LAYERS_KEY) or max(layers, default=0) < settings["num_hidden_layers"]:
        return []
    return [
        f"model.path={path}: {NEXTN_LAYERS_KEY}={settings[NEXTN_LAYERS_KEY]}: layers"
        f" that predict several"
        " tokens at once are not trained, and left out of checkpoints"
    ]


def _explain_quantised(settings: Mapping[str, Any]) -> str:
    found = settings.get("quantization_config")
    if not found:
        return ""
    return f"quantization_config: {found.get('quant_method')} weights: {QUANTISED_ADVICE}"


def _explain_unservable(config: Any, *, is_part: bool) -> str:
    """What vLLM would serve in place of the class that is trained, or cannot."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if is_part and importlib.util.find_spec("torchvision") is None:
        return (
            f"model_type={config.model_type}: a model of more than text, which vLLM serves with"
            " torchvision only; load its language model with transformers, save it, and train that"
        )
    found = (config.architectures or [""])[0]
    trained = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    if not found or not trained or found == trained or found.endswith("Model"):
        return ""
    return (
        f'config.json: architectures=["{found}"]: must be ["{trained}"], the class that is trained,'
        " for vLLM to serve it"
    )


def _explain_vllm_mismatch(family: str, settings: Mapping[str, Any], stored: TensorShapes) -> str:
    """What vLLM's model of a family leaves out, or does not take, with these settings."""
    windows = bool(settings.get("use_sliding_window"))
    kinds, clip = set(settings.get("layer_types") or ()), settings.get("clip_qkv")
    is_tied = bool(settings.get("tie_word_embeddings"))
    heads, kv_heads = (settings.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    bare = next((name for name in stored if name.startswith("layers.")), "")
    routed = settings.get("num_experts_per_tok")
    experts = next(filter(None, map(settings.get, EXPERT_COUNT_KEYS)), None)
    biased = next((name for name in stored if name.endswith("self_attn.o_proj.bias")), "")
    rules = {
        "max_window_layers: vLLM takes a sliding window for all layers or none": (
            family in ("qwen2", "qwen3") and len(kinds) > 1 and windows
        ),
        "use_sliding_window=true: vLLM leaves the window of this family out": (
            family in ("qwen2_moe", "qwen3_moe") and windows
        ),
        "tie_word_embeddings=false: vLLM has no head of its own for this family": (
            family in ("gemma", "gemma2", "gemma3_text") and not is_tied
        ),
        f"num_experts_per_tok={routed}: must be from 1 to the number of experts, {experts}": bool(
            experts and routed is not None and not 0 < routed <= experts
        ),
        f"num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}": bool(
            heads and kv_heads and heads % kv_heads
        ),
        f"its files have {bare}, a name that vLLM does not take; {RESAVE_ADVICE}": bool(bare),
        f"clip_qkv={clip}: vLLM does not clip": family == "olmoe" and bool(clip),
        f"attention_bias=true: vLLM has no place for {biased}": (
            family in ("qwen3", "qwen3_moe") and bool(biased)
        ),
    }
    return next((text for text, holds in rules.items() if holds), "")


def _explain_wrong_attention(family: str, settings: Mapping[str, Any], wanted: str) -> str:
    """What is wrong with a way of computing attention that was asked for."""
    if wanted == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "needs the package flash-attn, which is not installed; auto does without"
    if wanted == "sdpa" and settings.get("attn_logit_softcapping"):
        return "leaves out the cap of attention's logits, which vLLM applies; use auto"
    if wanted in ("sdpa", "flash") and family == "gpt_oss":
        return "leaves out the sinks of this family's attention; use auto"
    return ""


def check_weight_files(path: str, key: str, *, is_served: bool = True) -> None:
    """Raise ConfigError unless a directory's tensors are those of the model its config describes.

    That is transformers' class, whose import takes a second. The tensors of some families are known
    without it. A critic, which is not served, needs no head over the vocabulary.
    """
    if (Path(path) / ADAPTER_FILE).exists():
        raise ConfigError(
            f"{key}={path}: {ADAPTER_FILE}: transformers would put an adapter on the"
            f" model, vLLM would"
            " not; move it elsewhere"
        )
    tensors = read_stored_tensors(Path(path), key)
    for name, tensor in tensors.items():
        if name.endswith("weight") and tensor.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{key}={path}: {name} is stored as {tensor.dtype}: {QUANTISED_ADVICE}"
            )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    num_layers, last = read_num_layers(Path(path)), max(_parse_layer_numbers(shapes), default=-1)
    if 0 <= last < num_layers - 1:
        raise ConfigError(
            f"{key}={path}: its files hold {last + 1} layers, config.json says {num_layers}"
        )
    settings = read_model_config(path).get_text_config().to_dict()
    _check_positive(path, key, settings)
    if shapes != _predict_shapes(settings, is_tied="lm_head.weight" not in shapes):
        problem = _load_on_meta(path, shapes, is_served=is_served)
        if problem:
            raise ConfigError(f"{key}={path}: {problem}")


def _check_positive(path: str, key: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for numbers of which a model computes nothing, but that give no error."""
    rope = settings.get("rope_parameters") or {}
    has_windows = "sliding_attention" in (settings.get("layer_types") or ["sliding_attention"])
    names = (*POSITIVE_KEYS, "sliding_window") if has_windows else POSITIVE_KEYS
    for place in (settings, rope, *(value for value in rope.values() if isinstance(value, dict))):
        for name in names:
            value = place.get(name)
            is_number = isinstance(value, int | float) and 0 < value < math.inf
            if value is not None and not is_number:
                raise ConfigError(
                    f"{key}={path}: config.json: {name}={value!r}: must be a number above 0"
                )


def _predict_shapes(settings: Mapping[str, Any], *, is_tied: bool) -> dict[str, tuple[int, ...]]:
    """Return all tensors of the plainest families by name; nothing of another."""
    family, heads = settings["model_type"], settings.get("num_attention_heads")
    rope = (settings.get("rope_parameters") or {}).get("rope_type")
    # Of all else there may be other tensors, or no such model, which the class finds out.
    is_plain = (
        family in ("llama", "mistral", "qwen2", "qwen3")
        and not any(map(settings.get, ("attention_bias", "mlp_bias")))
        and (rope, settings.get("hidden_act")) == ("default", "silu")
        and heads
        and 0 <= (settings.get("pad_token_id") or 0) < settings["vocab_size"]
        and str(settings.get("dtype")).removeprefix("torch.") in PLAIN_DTYPES
        and (settings.get("tie_word_embeddings") or not is_tied)
    )
    if not is_plain:
        return {}
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    size = settings.get("head_dim") or hidden // heads
    queries, keys = heads * size, (settings.get("num_key_value_heads") or heads) * size
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if family == "qwen2":
        sizes = {"q": queries, "k": keys, "v": keys}
        layer |= {f"self_attn.{one}_proj.bias": (size,) for one, size in sizes.items()}
    if family == "qwen3":
        layer |= {f"self_attn.{one}_norm.weight": (size,) for one in "qk"}
    ends = ["model.embed_tokens.weight", *([] if is_tied else ["lm_head.weight"])]
    return {
        **dict.fromkeys(ends, (settings["vocab_size"], hidden)),
        "model.norm.weight": (hidden,),
        **{
            f"model.layers.{number}.{name}": shape
            for number in range(settings["num_hidden_layers"])
            for name, shape in layer.items()
        },
    }


def _load_on_meta(path: str, shapes: TensorShapes, *, is_served: bool) -> str:
    """Load tensors of these shapes as transformers does, without their values.

    Returns what is wrong with them, if anything is.
    """
    load = load_skeleton if is_served else load_value_skeleton
    try:
        with silence_transformers():
            skeleton = load(path)
            _, found = type(skeleton).from_pretrained(
                None,
                config=skeleton.config,
                state_dict={name: torch.empty(s, device="meta") for name, s in shapes.items()},
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a class makes of wrong settings
        return _explain_load_failure(error, "policy" if is_served else "critic")
    if mismatched := found["mismatched_keys"]:
        name, shape, wanted = min(mismatched)
        return f"{name} has shape {tuple(shape)} in its files, {tuple(wanted)} by config.json"
    settings = skeleton.config.get_text_config()
    num_layers, num_more = settings.num_hidden_layers, vars(settings).get(NEXTN_LAYERS_KEY) or 0
    more = {number for number in _parse_layer_numbers(shapes) if number >= num_layers}
    if len(more) > num_more:
        return f"its files hold {max(more) + 1} layers, config.json says {num_layers}"
    odd = sorted(
        name
        for name in found["unexpected_keys"]
        # A critic has a head of its own in place of others; vLLM takes none that it does not know.
        if not (RECOMPUTED_TENSORS if is_served else UNTRAINED_TENSORS).search(name)
        and _parse_layer_numbers([name]).isdisjoint(more)
        and (is_served or LAYER_NUMBER_PATTERN.search(name))
    )
    missing = [n for n in found["missing_keys"] if is_served or not n.startswith(VALUE_HEAD_PREFIX)]
    # What is tied to another is missing with it.
    tied = skeleton.all_tied_weights_keys
    lost = sorted(missing, key=lambda name: (name in tied, name))
    instead = f"; they have {odd[0]}, which is none of the model's" if odd else ""
    if lost:
        shape = tuple(skeleton.state_dict()[lost[0]].shape)
        return f"its files lack {lost[0]}, of shape {shape}{instead}"
    return f"its files have {odd[0]}, which is none of the model's parameters" if odd else ""


def _explain_load_failure(error: Exception, role: str) -> str:
    """Say what a model's class, or the choice of one, raised of a directory's settings."""
    text = " ".join(str(error).split())
    if text.startswith("Unrecognized configuration class"):
        return f"config.json: transformers has no class that makes a {role} of this family"
    if "automatic conversion" in text:
        return "its files lack a tensor of the experts, or have one of another shape than the rest"
    return f"config.json: transformers makes no such model: {type(error).__name__}: {text[:300]}"


def _parse_layer_numbers(names: Iterable[str]) -> set[int]:
    """Return the numbers of the layers that tensors of these names belong to."""
    numbers = (
        LAYER_NUMBER_PATTERN.search(name) for name in names if not UNTRAINED_TENSORS.search(name)
    )
    return {int(number[1]) for number in numbers if number}
