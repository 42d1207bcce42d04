"""Script that lets vLLM judge a model directory and the engine's settings, without weights.

Writes why vLLM does not serve the model, as JSON; "" if it does. Runs in a process of its own,
since vLLM's imports are slow and its model classes may change a process or end it.
"""

import contextlib
import json
import logging
import sys

from streamrl.distributed.devices import has_local_gpu
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.engine import EngineSpec, build_vllm_engine, make_engine_config
from streamrl.engines.vllm.model_registry import is_served_by_transformers
from streamrl.files.hf_config import read_model_config

MAX_REASON = 500


def explain_unservable(spec: EngineSpec) -> str:
    """Explain why vLLM cannot serve a model; "" if it can."""
    try:
        config = make_engine_config(spec).model_config
        _import_model_class(spec.model_path)
    except Exception as error:  # noqa: BLE001 - vLLM and model classes raise any type
        # vLLM's own error refers to logs for the reason of a failed import.
        return _find_import_error(spec.model_path) or _describe_error(error)
    is_rare = config.has_inner_state or is_served_by_transformers(config.architectures)
    if is_rare and not has_local_gpu():
        try:
            _sample_token(spec)
        except Exception as error:  # noqa: BLE001
            return f"its layers do not run on a CPU: {_describe_error(error)}"
    return ""


def _import_model_class(path: str) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for name in read_model_config(path).architectures or ():
        if (registered := ModelRegistry.models.get(name)) is not None:
            registered.load_model_cls()


def _sample_token(spec: EngineSpec) -> None:
    """Sample a token with random weights: vLLM lacks CPU kernels of some layers with state."""
    from vllm import SamplingParams

    engine = build_vllm_engine(spec, load_format="dummy")
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    engine.add_request("0", prompt, SamplingParams(max_tokens=2, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()


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
    sys.stdout.write(json.dumps(reason))


if __name__ == "__main__":
    main()
