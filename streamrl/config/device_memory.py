"""Check, before a run starts an actor, that models fit the GPUs on which it places them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.config.role_counts import assign_slots, count_ranks_per_replica
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import CRITIC_ROLES, GENERATE_CALL, POLICY, SERVING_ROLES
from streamrl.engines.memory.training_memory import (
    DTYPE_BYTES,
    PARAMETER_SHARDING_STAGE,
    estimate_rank_memory,
)
from streamrl.engines.memory.worker_memory import CUDA_CONTEXT_BYTES, MIB, WorkerMemory
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_stored_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 1 << 30
ESTIMATE_ERROR = 1.12
"""Most by which the estimate of a rank's peak exceeded the measured one (docs/gpus.md)."""


@dataclass(frozen=True)
class GpuNeed:
    """Bytes of a process on its GPU: what it holds, and what it needs besides while it computes.

    remedy: settings that lower them.
    """

    role: str
    held: int
    active: int = 0
    remedy: str = ""


def find_gpu_shortage(config: RunConfig, model_bytes: Mapping[str, int], gpu_bytes: int) -> str:
    """Return why the processes of a GPU do not fit it, with the sum and what helps, or "".

    model_bytes: weight files by role. Processes on a GPU compute in turn. Without
    generator.kv_cache_mb a generator takes what its GPU has, and vLLM checks it.
    """
    placement = assign_slots(config)
    needs = {need.role: need for need in _list_needs(config, model_bytes, gpu_bytes)}
    for slot in range(placement.num_slots):
        here = [needs[role] for role in placement.list_roles(slot) if role in needs]
        total = sum(need.held for need in here) + max((n.active for n in here), default=0)
        if total / ESTIMATE_ERROR > gpu_bytes:
            parts = [f"{n.role} {(n.held + n.active) / GIB:.1f}" for n in here]
            remedies = [need.remedy for need in here if need.remedy]
            return (
                f"the models of a GPU need about {total / GIB:.1f} GiB, and it has"
                f" {gpu_bytes / GIB:.1f}: {' + '.join(parts)}; {'; '.join(remedies)}"
            )
    return ""


def _list_needs(config: RunConfig, model_bytes: Mapping[str, int], gpu_bytes: int) -> list[GpuNeed]:
    """Return the needs of each role's process; one that generates in the trainer's has none."""
    generator, is_hybrid = config.generator, config.placement.is_hybrid
    needs = []
    for role, num_bytes in model_bytes.items():
        if role in config.dataflow.trained_roles:
            memory = estimate_role_memory(config, role, on_gpu=True)
            if role == POLICY and is_hybrid:
                memory = memory.fit_budget(config.placement.memory_mb)
            active = max(memory.activations, memory.update_buffers)
            remedy = _find_remedy(config, role, gpu_bytes)
            needs.append(GpuNeed(role, memory.train_bytes - active, active, remedy))
        elif role == GENERATE_CALL.role and not is_hybrid and generator.kv_cache_mb:
            held = _count_loaded_bytes(config.model.path, generator.resolve_dtype(on_gpu=True))
            held = held // generator.tensor_parallel + generator.kv_cache_mb * MIB
            remedy = "a smaller generator.kv_cache_mb or a larger generator.tensor_parallel"
            # The actor of a split generator uses each of its GPUs, too.
            held += CUDA_CONTEXT_BYTES * (1 + (generator.tensor_parallel > 1))
            needs.append(GpuNeed(role, held, remedy=remedy))
        elif role != GENERATE_CALL.role and num_bytes:
            held = CUDA_CONTEXT_BYTES + _count_scorer_bytes(config, role, num_bytes)
            remedy = "scorer.offload=true"
            ranks = SERVING_ROLES[role].ranks or "world_size of the reward model"
            remedy += f" or a larger {ranks}"
            needs.append(GpuNeed(role, held, remedy=remedy))
    return needs


def _count_scorer_bytes(config: RunConfig, role: str, num_bytes: int) -> int:
    """Return the least bytes that a scorer holds; `num_bytes` are those of its model's files."""
    if config.scorer.offload:
        return 0
    if SERVING_ROLES[role].is_reward:
        # The files may be in float32, and load in bfloat16.
        return num_bytes // 2 // count_ranks_per_replica(config, role)
    call = config.dataflow.calls_by_role[role][0]
    ranks = config.get_ranks_config(call)
    return estimate_role_memory(config, call.model_role, on_gpu=True, trainer=ranks).weights


def _count_loaded_bytes(path: str, dtype: str) -> int:
    shapes = read_stored_shapes(Path(path), "model.path").values()
    return sum(map(prod, shapes)) * DTYPE_BYTES[dtype]


def _find_remedy(config: RunConfig, role: str, gpu_bytes: int) -> str:
    """Return the fewest settings of a trainer with which it fits a GPU, alone on it."""
    trainer = config.get_trainer_config(role)
    key = trainer.section
    settings: dict[str, Any] = {
        "gradient_checkpointing": True,
        "offload_optimizer": True,
        "zero_stage": PARAMETER_SHARDING_STAGE,
        "world_size": 2 * trainer.world_size,
    }
    changes = [item for item in settings.items() if vars(trainer)[item[0]] != item[1]]
    for size in (1, 2):
        fitting = []
        for change in combinations(changes, size):
            with suppress(ConfigError):
                changed = replace(trainer, **dict(change))
                memory = estimate_role_memory(config, role, on_gpu=True, trainer=changed)
                if memory.train_bytes / ESTIMATE_ERROR <= gpu_bytes:
                    texts = (f"{key}.{name}={str(value).lower()}" for name, value in change)
                    fitting.append(" with ".join(texts))
        if fitting:
            return f"it fits by {' or '.join(fitting)}"
    return f"{key}: more ranks, zero_stage=3, or a smaller pipeline.micro_batch_tokens"


def estimate_role_memory(
    config: RunConfig, role: str, *, on_gpu: bool, trainer: TrainerConfig | None = None
) -> WorkerMemory:
    """Estimate the memory of a rank that trains a role, with the generator of its process if any.

    trainer: other settings than those of the config.
    """
    from streamrl.engines.memory.memory_model import measure_training_sizes

    trainer = trainer or config.get_trainer_config(role)
    hosts_generator = role == POLICY and config.placement.is_hybrid
    return estimate_rank_memory(
        measure_training_sizes(load_role_skeleton(config, role), trainer, on_gpu=on_gpu),
        trainer,
        config.generator if hosts_generator else None,
        tokens=-(-config.pipeline.micro_batch_tokens // trainer.sequence_parallel),
        on_gpu=on_gpu,
    )


def load_role_skeleton(config: RunConfig, role: str) -> "PreTrainedModel":
    """Load the model of a role without weights: of policy, critic or reference.

    The policy has the value head that it shares with a critic, if any.
    """
    is_shared = role == POLICY and config.critic.shared_coef is not None
    return _load_skeleton(config.get_model_path(role), role not in CRITIC_ROLES, is_shared)


@lru_cache(maxsize=4)
def _load_skeleton(path: str, has_lm_head: bool, has_value_head: bool) -> "PreTrainedModel":
    import torch

    from streamrl.engines.models.forward import add_value_head, load_skeleton, load_value_skeleton

    module = load_skeleton(path) if has_lm_head else load_value_skeleton(path)
    if has_value_head:
        add_value_head(module, dtype=torch.float32)
    return module
