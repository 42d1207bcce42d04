"""Which of its classes vLLM serves a model with, without importing vLLM, which takes seconds."""

import functools
import importlib.util
import re
from pathlib import Path

from streamrl.model_config import read_model_config

ENTRY = re.compile(r'"(\w+)": \(\s*"(\w+)",\s*"\w+",?\s*\)')


@functools.cache
def _modules() -> dict[str, str]:
    """Return vLLM's module for each architecture, as its registry lists them."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return {}
    file = Path(found.origin).parent / "model_executor" / "models" / "registry.py"
    return dict(ENTRY.findall(file.read_text())) if file.is_file() else {}


def is_served_by_transformers(model_path: str) -> bool:
    """Whether vLLM builds the model in a directory of the classes of transformers.

    It does of families that it lists so, and of all that it does not know.
    """
    architectures = read_model_config(model_path).architectures or []
    return all(_modules().get(name, "transformers") == "transformers" for name in architectures)
