"""Script that lets vLLM judge a model directory and the engine's settings.

Writes why vLLM does not serve the model, as JSON; "" if it does. Runs in a process of its own,
since vLLM's imports are slow and its model classes may change a process or end it.
"""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable

import torch
from pydantic import ValidationError

from streamrl.distributed.devices import has_local_gpu
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.models.forward import ModelLoadOptions, compute_token_logprobs, load_model
from streamrl.engines.vllm.engine import make_engine_config
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.files.hf_config import read_model_config
from streamrl.weights.config import EXACT_LOGPROB_LIMIT, ROUNDED_LOGPROB_LIMIT
from streamrl.weights.versions import LogprobCheck, make_check_sequences

MAX_REASON = 500


def explain_unservable(spec: EngineSpec, *, is_proven: bool) -> str:
    """Explain why vLLM cannot serve a model; "" if it can. is_proven: no trial is needed."""
    attempts: list[tuple[str, Callable[[], object]]] = [
        # First, as vLLM's own error refers to logs for the reason of a failed import.
        ("its class cannot be imported: ", lambda: _import_model_class(spec.model_path)),
        ("", lambda: make_engine_config(spec)),
    ]
    if not is_proven and not has_local_gpu():
        attempts.append(("a trial on this CPU failed: ", lambda: asyncio.run(_try_model(spec))))
    for failure, attempt in attempts:
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - vLLM and model classes raise any type
            return f"{failure}{_describe_error(error)}"
    return ""


def _import_model_class(path: str) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for name in read_model_config(path).architectures or ():
        if (registered := ModelRegistry.models.get(name)) is not None:
            registered.load_model_cls()


async def _try_model(spec: EngineSpec) -> None:
    """Load the trainer's parameters into an engine, and compare what both compute.

    vLLM lacks CPU kernels of some layers, and settings and names of parameters of some classes.
    """
    options = ModelLoadOptions(max_length=spec.max_length)
    model = load_model(spec.model_path, dtype=torch.float32, options=options)
    vocab_size = model.config.get_text_config().vocab_size
    sequences = make_check_sequences(vocab_size=vocab_size, max_length=spec.max_length)
    rows = [torch.from_numpy(sequence)[None].long() for sequence in sequences]
    with torch.no_grad():
        scores = [compute_token_logprobs(model, row, row >= 0, temperature=1.0) for row in rows]
    limit = EXACT_LOGPROB_LIMIT if spec.config.dtype == "float32" else ROUNDED_LOGPROB_LIMIT
    check = LogprobCheck(sequences, [score.logprobs[0].numpy() for score in scores], limit)
    engine = await GenerationEngine.start(spec)
    try:
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        loaded = await engine.load_weights(parameters, 0)
        loaded.verification.raise_on_difference("vLLM")
        check.compare_logprobs(await engine.compute_logprobs(sequences), "vLLM")
    finally:
        await engine.close()


def _describe_error(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        text = "; ".join(item["msg"] for item in error.errors())
    return " ".join(text.split())[:MAX_REASON]


def main() -> None:
    """Probe the directory, generator settings, longest rollout and `is_proven` in sys.argv."""
    path, generator, max_length, is_proven = json.loads(sys.argv[1])
    logging.disable()
    spec = EngineSpec(path, GeneratorConfig(**generator), max_length)
    with contextlib.redirect_stdout(sys.stderr):
        reason = explain_unservable(spec, is_proven=is_proven)
    sys.stdout.write(json.dumps(reason))


if __name__ == "__main__":
    main()
