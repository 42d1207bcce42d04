"""Look up vLLM's class for a model in the source of vLLM's registry: importing vLLM is slow."""

import functools
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

AS_STORED_FAMILIES = frozenset(
    (
        *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2"),
        *("olmo3", "smollm3", "granite", "opt", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe"),
        *("granitemoe", "glm4_moe", "gpt_oss"),
    )
)
"""Families whose stored values vLLM holds unchanged, in whatever order. An engine of another family
must read the model directory, to find which layers cannot be compared with published versions."""

REGISTRY_ENTRY = re.compile(r'"(\w+)": \(\s*"(\w+)",\s*"\w+",?\s*\)')


@functools.cache
def _read_vllm_registry() -> dict[str, str]:
    """Return the name of vLLM's module for each architecture; empty if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    return dict(REGISTRY_ENTRY.findall(file.read_text())) if file.is_file() else {}


def is_served_by_transformers(architectures: Iterable[str]) -> bool:
    """Return whether vLLM serves a model with transformers' class instead of a class of its own.

    `architectures` are those of config.json. vLLM does so for architectures that its registry marks
    accordingly, and for unknown ones. Returns False if vLLM is not installed, as on a machine that
    only plans runs.
    """
    modules = _read_vllm_registry()
    if not modules:
        return False
    return all(modules.get(name, "transformers") == "transformers" for name in architectures)


def is_held_as_stored(config: Any) -> bool:
    """Return whether vLLM holds a model's stored values unchanged; `config` is its config.json."""
    is_quantized = hasattr(config, "quantization_config")
    return config.get_text_config().model_type in AS_STORED_FAMILIES and not is_quantized


def explain_unshareable_process(architectures: Iterable[str], *, mode: str, on_gpu: bool) -> str:
    """Explain why generator and trainer cannot run in the same process; "" if they can.

    `mode` is placement.mode; `architectures` are those in config.json of the generator's model.
    """
    if not on_gpu or not is_served_by_transformers(architectures):
        return ""
    return (
        f"placement.mode={mode}: vLLM serves this model with transformers' own classes, which on a"
        " GPU it changes for its whole process, the trainer's; use disaggregated"
    )
