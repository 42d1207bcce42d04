"""What a model directory alone says that trainer and generator cannot do, or not alike.

All of it is told before anything starts; what else there is, the probes of a run find. Families:
docs/models.md.
"""

import importlib.util
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch.nn import Module, Parameter

from streamrl.engines.forward import MORE_TOKENS, load_skeleton
from streamrl.errors import ConfigError
from streamrl.model_config import LAYER_NUMBER, num_layers_of, read_model_config, stored_shapes

Shapes = Mapping[str, tuple[int, ...]]
BESIDES = re.compile(
    r"rotary_emb\.|\.attention\.(masked_)?bias$|\.attn\.(masked_)?bias$"
    r"|(^|\.)mtp[_.]|^(score|v_head|value_head)\.|vision|visual"
)
"""Tensors that a model computes anew, or predicts several tokens with; other heads, and eyes."""


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
    check_weights(path, key, is_served=is_served)


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
    heads, kv_heads = (settings.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
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
        f"num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}": bool(
            heads and kv_heads and heads % kv_heads
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


def check_weights(path: str, key: str, *, is_served: bool = True) -> None:
    """Raise ConfigError unless a directory's tensors are those of the model its config describes.

    That is transformers' class, whose import takes a second. The tensors of some families are known
    without it. A critic, which is not served, needs no head over the vocabulary.
    """
    stored = stored_shapes(Path(path), key)
    num_layers, last = num_layers_of(Path(path)), max(_sizes_of_layers(stored), default=-1)
    if 0 <= last < num_layers - 1:
        raise ConfigError(
            f"{key}={path}: its files hold {last + 1} layers, config.json says {num_layers}"
        )
    settings = read_model_config(path).get_text_config().to_dict()
    if stored != _known_shapes(settings, is_tied="lm_head.weight" not in stored):
        _check_against_class(path, key, stored, settings, has_head=is_served)


def _known_shapes(settings: Mapping[str, Any], *, is_tied: bool) -> dict[str, tuple[int, ...]]:
    """Return all tensors of the plainest families by name; nothing of another."""
    family, heads = settings["model_type"], settings.get("num_attention_heads")
    rope = (settings.get("rope_parameters") or {}).get("rope_type")
    # Of all else there may be other tensors, or no such model, which the class finds out.
    is_plain = (
        family in ("llama", "mistral", "qwen2", "qwen3")
        and not any(map(settings.get, ("attention_bias", "mlp_bias")))
        and (rope, settings.get("hidden_act")) == ("default", "silu")
        and heads
        and (settings.get("pad_token_id") or 0) < settings["vocab_size"]
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


def _check_against_class(
    path: str, key: str, stored: Shapes, settings: Mapping[str, Any], *, has_head: bool
) -> None:
    """Compare with transformers' class, by layer.

    Tensors of another name, as those of single experts that the model has together, count by their
    elements.
    """
    try:
        model = load_skeleton(path)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a class makes of wrong settings
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{key}={path}: config.json: no such model: {reason[:300]}") from None
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
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
    more = len(held) - len(needed)
    if more > (settings.get(MORE_TOKENS) or 0):
        raise ConfigError(
            f"{key}={path}: its files hold {len(held)} layers, config.json says {len(needed)}"
        )
    head = [] if has_head else list(model.get_output_embeddings().parameters())
    if lost := _first_lost(stored, model, head):
        raise ConfigError(f"{key}={path}: its files lack {lost[0]}, of shape {lost[1]}")


def _first_lost(
    stored: Shapes, model: Module, besides: Sequence[Parameter]
) -> tuple[str, tuple[int, ...]] | None:
    """Return name and shape of the first parameter outside of layers that no file has.

    Names differ where a model is part of another. What is tied to another is one with it here.
    """
    ends = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if not any(parameter is one for one in besides)
    }
    others = Counter(shape for name, shape in stored.items() if name not in ends)
    for name, shape in ends.items():
        if name in stored or LAYER_NUMBER.search(name):
            continue
        if not others[shape]:
            return name, shape
        others[shape] -= 1
    return None


def _sizes_of_layers(shapes: Shapes) -> Counter[int]:
    found = Counter[int]()
    for name, shape in shapes.items():
        number = LAYER_NUMBER.search(name)
        if number and not BESIDES.search(name):
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
