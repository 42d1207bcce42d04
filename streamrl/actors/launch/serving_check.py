"""Let vLLM judge the policy's directory and the generator's settings."""

import contextlib
import functools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from streamrl.actors.launch.fork_server import GENERATOR_LEVEL, start_script
from streamrl.config.run_config import RunConfig
from streamrl.distributed.devices import has_local_gpu
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.model_registry import AS_STORED_FAMILIES
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_config

PROBE = str(Path(__file__).with_name("serving_probe.py"))
"""Script that is only run: its imports are slow."""
PROVEN_FAMILIES = AS_STORED_FAMILIES | {"deepseek_v2", "deepseek_v3"}
"""Families of docs/models.md that vLLM serves on a CPU without a trial: all but those with state,
and GPT-2, of whose settings vLLM's class refuses some."""


@contextlib.contextmanager
def probe_serving(config: RunConfig, max_length: int) -> Iterator[Callable[[], str]]:
    """Start a process that asks vLLM; yield a function that waits for the verdict.

    The function raises ConfigError if vLLM does not serve the model. It returns a note if there is
    no verdict, for a process that died or had the time of an engine's start. A family that is not
    proven has its verdict first. Nodes of a cluster may have other devices than this one, so they
    are not asked.
    """
    if config.placement.address:
        yield lambda: ""
        return
    # The split over processes and their memory are checked elsewhere.
    generator = replace(config.generator, tensor_parallel=1)
    family = read_model_config(config.model.path).get_text_config().model_type
    is_proven = family in PROVEN_FAMILIES
    request = json.dumps([config.model.path, asdict(generator), max_length, is_proven])
    env = make_vllm_env("cuda" if has_local_gpu() else "cpu")
    process = start_script(GENERATOR_LEVEL, env, PROBE, request)

    @functools.cache
    def check() -> str:
        timeout_s = config.generator.start_timeout_s
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"vLLM has not judged the model in generator.start_timeout_s={timeout_s:g}"
        if not output:
            return f"vLLM has not judged the model: exit code {process.returncode}"
        if reason := json.loads(output):
            raise ConfigError(
                f"model.path={config.model.path}: vLLM does not serve it with the settings of this"
                f" run: {reason}"
            )
        return ""

    try:
        if not is_proven:
            check()
        yield check
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
