"""What a model directory alone says that trainer and generator cannot do, or not alike.

All of it is told before anything starts; what else there is, the probes of a run find. Families:
docs/models.md.
"""

import importlib.util
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from streamrl.engines.forward import MORE_TOKENS, load_skeleton
from streamrl.errors import ConfigError
from streamrl.model_config import LAYER_NUMBER, is_like_llama, read_model_config, stored_shapes

Shapes = Mapping[str, tuple[int, ...]]
COMPUTED = re.compile(r"rotary_emb\.|\.attention\.(masked_)?bias$|\.attn\.(masked_)?bias$")
"""Tensors of older directories that a model computes anew."""


def check_support(
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
    config = read_model_config(path).get_text_config()
    settings, stored = config.to_dict(), stored_shapes(Path(path), key)
    problem = _quantised(settings)
    if is_served:
        problem = problem or _unlike(config.model_type, settings, stored)
    if problem:
        raise ConfigError(f"{key}={path}: {problem}")
    if problem := _wrong_attention(config.model_type, settings, attention):
        raise ConfigError(f"{section}.attention={attention}: {problem}")
    if not is_like_llama(config.model_type):
        check_against_class(path, key)


def left_out(path: str) -> list[str]:
    """Say what of a model is not trained, and will not be in its checkpoints."""
    settings = read_model_config(path).get_text_config().to_dict()
    layers = _sizes_of_layers(stored_shapes(Path(path), "model.path"))
    if not settings.get(MORE_TOKENS) or max(layers, default=0) < settings["num_hidden_layers"]:
        return []
    return [
        f"model.path={path}: {MORE_TOKENS}={settings[MORE_TOKENS]}: layers that predict several"
        " tokens at once are not trained, and left out of checkpoints"
    ]


def _quantised(settings: Mapping[str, Any]) -> str:
    found = settings.get("quantization_config")
    if not found:
        return ""
    return (
        f"quantization_config: {found.get('quant_method')} weights cannot be trained; load the"
        " directory with transformers, dequantized, save it, and train that"
    )


def _unlike(family: str, settings: Mapping[str, Any], stored: Shapes) -> str:
    """What vLLM's model of a family leaves out, or does not take, with these settings."""
    windows = bool(settings.get("use_sliding_window"))
    kinds, clip = set(settings.get("layer_types") or ()), settings.get("clip_qkv")
    is_tied = bool(settings.get("tie_word_embeddings"))
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
        f"clip_qkv={clip}: vLLM does not clip": family == "olmoe" and bool(clip),
        f"attention_bias=true: vLLM has no place for {biased}": (
            family in ("qwen3", "qwen3_moe") and bool(biased)
        ),
    }
    return next((text for text, holds in rules.items() if holds), "")


def _wrong_attention(family: str, settings: Mapping[str, Any], wanted: str) -> str:
    """What is wrong with a way of computing attention that was asked for."""
    if wanted == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "needs the package flash-attn, which is not installed; auto does without"
    if wanted == "sdpa" and settings.get("attn_logit_softcapping"):
        return "leaves out the cap of attention's logits, which vLLM applies; use auto"
    if wanted in ("sdpa", "flash") and family == "gpt_oss":
        return "leaves out the sinks of this family's attention; use auto"
    return ""


def check_against_class(path: str, key: str) -> None:
    """Raise ConfigError unless a directory's tensors are those of transformers' model, by layer.

    Tensors of another name, as those of single experts that the model has together, count by their
    elements.
    """
    stored = stored_shapes(Path(path), key)
    try:
        state = load_skeleton(path).state_dict()
    except (RuntimeError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{key}={path}: config.json: no such model: {reason}") from None
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in stored.keys() & wanted.keys():
        if stored[name] != wanted[name]:
            raise ConfigError(
                f"{key}={path}: {name} has shape {stored[name]} in its files,"
                f" {wanted[name]} by config.json"
            )
    held, needed = _sizes_of_layers(stored), _sizes_of_layers(wanted)
    for layer, size in sorted(needed.items()):
        if held[layer] != size:
            name, shape = _first_apart(stored, wanted, layer)
            raise ConfigError(
                f"{key}={path}: layer {layer} has {held[layer]:,} elements in its files,"
                f" {size:,} by config.json: see {name}, of shape {shape}"
            )


def _sizes_of_layers(shapes: Shapes) -> Counter[int]:
    found = Counter[int]()
    for name, shape in shapes.items():
        number = LAYER_NUMBER.search(name)
        if number and not COMPUTED.search(name):
            found[int(number[1])] += prod(shape)
    return found


def _first_apart(stored: Shapes, wanted: Shapes, layer: int) -> tuple[str, tuple[int, ...]]:
    """The largest tensor of a layer that only one of both has; the files' own come first."""
    of_layer = re.compile(rf"\.{layer}\.")
    for there, other in ((stored, wanted), (wanted, stored)):
        apart = [name for name in there if name not in other and of_layer.search(name)]
        if apart:
            name = max(apart, key=lambda each: prod(there[each]))
            return name, there[name]
    name = next(name for name in stored if of_layer.search(name))
    return name, stored[name]
