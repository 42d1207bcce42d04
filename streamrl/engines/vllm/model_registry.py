"""Which of its classes vLLM serves a model with, without importing vLLM, which takes seconds."""

import functools
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

REGISTRY_ENTRY = re.compile(r'"(\w+)": \(\s*"(\w+)",\s*"\w+",?\s*\)')


@functools.cache
def _read_vllm_registry() -> dict[str, str]:
    """Return vLLM's module for each architecture, as its registry lists them."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return {}
    file = Path(found.origin).parent / "model_executor" / "models" / "registry.py"
    return dict(REGISTRY_ENTRY.findall(file.read_text())) if file.is_file() else {}


def is_served_by_transformers(architectures: Iterable[str]) -> bool:
    """Whether vLLM builds a model of these architectures of the classes of transformers.

    It does of families that it lists so, and of all that it does not know. Where there is no vLLM,
    as where a run is only planned, it is taken to know them.
    """
    modules = _read_vllm_registry()
    if not modules:
        return False
    return all(modules.get(name, "transformers") == "transformers" for name in architectures)


def explain_unshareable_process(architectures: Iterable[str], *, mode: str, on_gpu: bool) -> str:
    """Why a generator cannot live in a trainer's process, as in that placement.mode; "" if it can.

    architectures: of the model that it serves.
    """
    if not on_gpu or not is_served_by_transformers(architectures):
        return ""
    return (
        f"placement.mode={mode}: vLLM serves this model with transformers' own classes, which on a"
        " GPU it changes for its whole process, the trainer's; use disaggregated"
    )
