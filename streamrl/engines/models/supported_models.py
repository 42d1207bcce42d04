"""Checks of a model directory: can transformers train it and vLLM serve it with equal results?

The checks run before any actor starts and read only config and headers. The probe of vLLM and the
logprob checks of a run find further differences. Families: docs/models.md.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from streamrl.engines.models.forward import (
    NEXTN_LAYERS_KEY,
    VALUE_HEADS,
    choose_attention,
    load_skeleton,
    load_value_skeleton,
)
from streamrl.engines.models.lora import find_lora_layers
from streamrl.engines.models.packed_rows import explain_padding
from streamrl.engines.models.tensor_parallel import WHOLE_LOGITS
from streamrl.engines.models.tensor_parallel_support import check_trainer_split
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError, format_error
from streamrl.files.hf_config import (
    LAYER_NUMBER_PATTERN,
    RECOMPUTED_TENSORS,
    read_model_config,
    read_stored_shapes,
)

TensorShapes = Mapping[str, tuple[int, ...]]
UNTRAINED_TENSORS = re.compile(
    rf"{RECOMPUTED_TENSORS.pattern}|(^|\.)mtp[_.]|^(score|v_head|value_head)\.|vision|visual"
)
"""Names of tensors that training ignores: recomputed buffers, MTP layers, value heads, vision."""
ADAPTER_FILE = "adapter_config.json"
RESAVE_ADVICE = "load the directory with transformers, save it, and train that"


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


def check_trained_model(
    path: str, trainer: TrainerConfig, *, key: str, is_served: bool
) -> list[str]:
    """Return notes on a model that is trained as configured; raise ConfigError if it cannot be.

    `path`, `key` and `is_served` are those of `check_model_support`.
    """
    check_model_support(path, key=key, is_served=is_served)
    check_trainer_split(path, trainer)
    with silence_transformers():
        skeleton = load_skeleton(path)
    if trainer.lora_rank:
        find_lora_layers(skeleton, section=trainer.section)
    config = read_model_config(path)
    chosen = choose_attention(config, trainer.attention) or skeleton.config._attn_implementation
    padding, notes = explain_padding(type(skeleton), config, chosen), []
    if padding and trainer.sequence_parallel > 1:
        setting = f"{trainer.section}.sequence_parallel={trainer.sequence_parallel}"
        raise ConfigError(f"{setting}: needs packed rows, but {path} is padded: {padding}")
    if padding:
        notes.append(f"micro-batches are padded, not packed: {padding}")
    if whole_logits := vars(skeleton)[WHOLE_LOGITS]:
        notes.append(f"logits exist for all tokens of a micro-batch at once: {whole_logits}")
    settings = config.get_text_config().to_dict()
    layers = _parse_layer_numbers(read_stored_shapes(Path(path), key))
    if settings.get(NEXTN_LAYERS_KEY) and max(layers, default=0) >= settings["num_hidden_layers"]:
        notes.append(
            f"{NEXTN_LAYERS_KEY}={settings[NEXTN_LAYERS_KEY]}: layers that predict several tokens"
            " at once are not trained, and left out of checkpoints"
        )
    return [f"{key}={path}: {note}" for note in notes]


def check_model_support(path: str, *, key: str = "model.path", is_served: bool = True) -> None:
    """Raise ConfigError unless transformers and vLLM support the model and compute the same.

    `path` is the model directory, which the config key `key` names. With `is_served` False, as for
    a critic, vLLM need not support the model.
    """
    config = read_model_config(path)
    settings, stored = config.get_text_config().to_dict(), read_stored_shapes(Path(path), key)
    problem = ""
    if settings.get("quantization_config"):
        problem = f"quantization_config: quantized weights cannot be trained; {RESAVE_ADVICE}"
    elif is_served:
        problem = _explain_vllm_mismatch(config, settings, stored)
    if problem:
        raise ConfigError(f"{key}={path}: {problem}")
    check_weight_files(path, key, is_served=is_served)


def _explain_vllm_mismatch(config: Any, settings: Mapping[str, Any], stored: TensorShapes) -> str:
    """Explain why vLLM would compute something else than transformers; "" if it would not.

    `settings` are those of the language model of `config`, and `stored` the tensors in the files.
    """
    family, has_window = settings["model_type"], bool(settings.get("use_sliding_window"))
    served = (config.architectures or [""])[0]
    trained = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    is_other_class = served and trained and served != trained and not served.endswith("Model")
    layer_types, clip_qkv = set(settings.get("layer_types") or ()), settings.get("clip_qkv")
    unprefixed = next((name for name in stored if name.startswith("layers.")), "")
    biased = next((name for name in stored if name.endswith("self_attn.o_proj.bias")), "")
    rules = {
        f'architectures=["{served}"]: must be ["{trained}"], the class that is trained': (
            is_other_class
        ),
        "max_window_layers: vLLM takes a sliding window for all layers or none": (
            family in ("qwen2", "qwen3") and len(layer_types) > 1 and has_window
        ),
        "use_sliding_window=true: vLLM leaves the window of this family out": (
            family in ("qwen2_moe", "qwen3_moe") and has_window
        ),
        "tie_word_embeddings=false: vLLM has no separate head for this family": (
            family == "gemma2" and not settings.get("tie_word_embeddings")
        ),
        f"its files have {unprefixed}, a name that vLLM does not take; {RESAVE_ADVICE}": unprefixed,
        f"clip_qkv={clip_qkv}: vLLM does not clip": family == "olmoe" and clip_qkv,
        f"attention_bias=true: vLLM has no parameter for {biased}": (
            family in ("qwen3", "qwen3_moe") and biased
        ),
    }
    return next((text for text, applies in rules.items() if applies), "")


def check_weight_files(path: str, key: str, *, is_served: bool = True) -> None:
    """Raise ConfigError unless a directory's tensors match the model of its config.json.

    Loads tensors of these shapes into transformers' class on the meta device, as a trial. With
    `is_served` False, as for a critic, the output head may be missing.
    """
    if (Path(path) / ADAPTER_FILE).exists():
        raise ConfigError(
            f"{key}={path}: {ADAPTER_FILE}: transformers would put an adapter on the model, vLLM"
            " would not; move it elsewhere"
        )
    shapes = read_stored_shapes(Path(path), key)
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
    except Exception as error:
        role = "policy" if is_served else "critic"
        raise ConfigError(
            f"{key}={path}: transformers makes no {role} of config.json and these files:"
            f" {format_error(error):.300}"
        ) from error
    if problem := _explain_loading(skeleton, loading_info, is_served=is_served):
        raise ConfigError(f"{key}={path}: {problem}")


def _explain_loading(skeleton: Any, loading_info: Mapping[str, Any], *, is_served: bool) -> str:
    """Explain which tensors of the files do not fit the model; "" if all do."""
    if mismatched := loading_info["mismatched_keys"]:
        name, shape, expected = min(mismatched)
        return f"{name} has shape {tuple(shape)} in its files, {tuple(expected)} by config.json"
    settings = skeleton.config.get_text_config()
    num_layers, num_extra = settings.num_hidden_layers, vars(settings).get(NEXTN_LAYERS_KEY) or 0
    untrained_layers = set(range(num_layers, num_layers + num_extra))
    unexpected = sorted(
        name
        for name in loading_info["unexpected_keys"]
        # A critic replaces other heads by its own; vLLM rejects tensors that it does not know.
        if not (RECOMPUTED_TENSORS if is_served else UNTRAINED_TENSORS).search(name)
        and _parse_layer_numbers([name]).isdisjoint(untrained_layers)
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


def _parse_layer_numbers(names: Iterable[str]) -> set[int]:
    matches = (
        LAYER_NUMBER_PATTERN.search(name) for name in names if not UNTRAINED_TENSORS.search(name)
    )
    return {int(match[1]) for match in matches if match}
