"""Script that lets vLLM judge a model directory and the engine's settings, without weights.

Prints why vLLM does not serve the model, as JSON; "" if it does. Runs in a process of its own,
since vLLM's imports are slow and its model classes may change a process or end it.
"""

import contextlib
import json
import logging
import sys

from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.engine import EngineSpec, make_engine_config
from streamrl.files.hf_config import read_model_config

MAX_REASON = 500


def explain_unservable(spec: EngineSpec) -> str:
    """Explain why vLLM cannot serve a model; "" if it can."""
    try:
        make_engine_config(spec)
        _import_model_class(spec.model_path)
    except Exception as error:  # noqa: BLE001 - vLLM and model classes raise any type
        # vLLM's own error refers to logs for the reason of a failed import.
        return _find_import_error(spec.model_path) or _describe_error(error)
    return ""


def _import_model_class(path: str) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for name in read_model_config(path).architectures or ():
        if (registered := ModelRegistry.models.get(name)) is not None:
            registered.load_model_cls()


def _find_import_error(path: str) -> str:
    try:
        _import_model_class(path)
    except Exception as error:  # noqa: BLE001
        return f"its class cannot be imported: {_describe_error(error)}"
    return ""


def _describe_error(error: Exception) -> str:
    from pydantic import ValidationError

    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        text = "; ".join(item["msg"] for item in error.errors())
    return " ".join(text.split())[:MAX_REASON]


def main() -> None:
    """Probe the model directory, settings of the generator and longest rollout in sys.argv."""
    path, generator, max_length = json.loads(sys.argv[1])
    logging.disable()
    with contextlib.redirect_stdout(sys.stderr):
        reason = explain_unservable(EngineSpec(path, GeneratorConfig(**generator), max_length))
    print(json.dumps(reason))


if __name__ == "__main__":
    main()
