"""Environment variables that worker processes need before they import their engines."""

from streamrl.actors.launch.fork_server import (
    BASE_LEVEL,
    GENERATOR_LEVEL,
    MODELS_LEVEL,
    STAGE_ENV,
    TRAINER_LEVEL,
    make_level_env,
)
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import GENERATE_CALL, POLICY, REFERENCE_CALL, CallKind, ModelCall
from streamrl.distributed.devices import NCCL_ENV, make_device_env
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.files.hf_config import make_trusted_env


def make_worker_env(config: RunConfig, call: ModelCall, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables of an actor that serves a model call."""
    shared_env = {**STAGE_ENV, **make_trusted_env(*config.trusted_models)}
    shared_env |= make_device_env(on_gpu=on_gpu) | (NCCL_ENV if on_gpu else {})
    if call.kind is CallKind.GENERATE:
        env = make_vllm_env("cuda" if on_gpu else "cpu", threads=config.generator.threads)
        return {**shared_env, **env, **make_level_env(GENERATOR_LEVEL)}
    if call.kind is CallKind.TRAIN:
        env = {"OMP_NUM_THREADS": str(config.get_trainer_config(call.role).threads)}
        env |= {} if on_gpu else {"DS_ACCELERATOR": "cpu"}
        return {**shared_env, **env, **make_level_env(TRAINER_LEVEL)}
    has_model = bool(call.followed_role) or call.role == REFERENCE_CALL.role
    return {**shared_env, **make_level_env(MODELS_LEVEL if has_model else BASE_LEVEL)}


def make_hybrid_env(config: RunConfig, *, on_gpu: bool) -> dict[str, str]:
    """Return the environment variables of a process that trains the policy and generates."""
    env: dict[str, str] = {}
    for role in (GENERATE_CALL.role, POLICY):
        env |= make_worker_env(config, config.dataflow.calls_by_role[role][0], on_gpu=on_gpu)
    return env | make_level_env(GENERATOR_LEVEL)
