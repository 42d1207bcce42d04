"""Which way the weights of a run take, by what the models and the cluster are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
import torch

from streamrl.actors.launch.ray_cluster import get_object_store_bytes
from streamrl.actors.transport.transport_spec import TransportSpec
from streamrl.config import RunConfig
from streamrl.dataflow import EMA_REFERENCE, GENERATE_CALL, POLICY
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.memory.memory_model import has_shared_weights
from streamrl.engines.models.forward import load_skeleton, load_value_skeleton
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.models.param_count import count_trained_params_from_config
from streamrl.engines.models.two_heads import add_value_head
from streamrl.engines.vllm.rank_groups import assign_rank_groups
from streamrl.placement import ResourceDemand
from streamrl.weights.config import SHARED_MEMORY
from streamrl.weights.transport_choice import (
    ClusterFacts,
    PublishedModel,
    choose_transport,
    divide_shared_memory,
)
from streamrl.weights.transports.shm_segments import (
    get_free_bytes,
    get_total_bytes,
    remove_stale_segments,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IN_PLACE_REASON = "weights: in place, as the trainer and the generator of a rank share them"
FROM_RANKS_REASON = "weights: into the generator of each rank, which lacks what other ranks keep"
WITHIN_PROCESS_REASON = "weights: within each process, to a generator that has a copy of its own"


def plan_transport(
    config: RunConfig, demands: Sequence[ResourceDemand], *, token: str
) -> TransportSpec:
    """Choose a transport for a run on the cluster this process is connected to.

    `demands` are its actors. Raises ConfigError, with the arithmetic, if the one that is asked for
    is impossible.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # What runs that were killed have left is free.
    remove_stale_segments()
    facts = ClusterFacts(
        num_nodes=len(nodes),
        models=_list_published_models(config, demands),
        max_staleness=config.pipeline.max_staleness,
        shm_free_bytes=get_free_bytes(),
        object_store_bytes=_get_store_bytes(),
    )
    choice = choose_transport(config.weights, facts)
    if config.placement.is_hybrid:
        others = choice.reason.removeprefix("weights: ")
        on_gpu = any(demand.gpus for demand in demands)
        reason = _describe_hybrid_transport(config, on_gpu=on_gpu)
        reason = f"{reason}; others: {others}" if facts.models else reason
        choice = replace(choice, reason=reason)
    shared = choice.transport == SHARED_MEMORY
    return TransportSpec(
        choice,
        token,
        config.run_dir.absolute(),
        config.weights.keep_versions,
        max_bytes=divide_shared_memory(config.weights, facts) if shared else {},
        node=nodes[0] if shared else "",
    )


def _describe_hybrid_transport(config: RunConfig, *, on_gpu: bool) -> str:
    """How weights come from a rank to the generator of its process."""
    if config.generator.tensor_parallel > 1:
        return _describe_rank_groups(config)
    if config.trainer.has_sharded_params:
        return FROM_RANKS_REASON
    shares = has_shared_weights(config.trainer, config.generator, on_gpu=on_gpu)
    return IN_PLACE_REASON if shares else WITHIN_PROCESS_REASON


def _describe_rank_groups(config: RunConfig) -> str:
    teams = assign_rank_groups(config.trainer, config.generator.tensor_parallel)
    told = ", ".join("-".join(map(str, team)) for team in teams)
    return f"weights: each rank fills its part of the generator of its team; ranks {told}"


def _list_published_models(
    config: RunConfig, demands: Sequence[ResourceDemand]
) -> tuple[PublishedModel, ...]:
    """The models that are published: what is trained of each, and a reference that moves."""
    readers: Counter[str] = Counter()
    together = config.placement.is_hybrid
    for demand in demands:
        if together and demand.role == GENERATE_CALL.role:
            continue
        for role in {call.followed_role for call in demand.calls if call.followed_role}:
            readers[role] += demand.count
    sizes = {}
    for role in config.dataflow.trained_roles:
        trainer = config.get_trainer_config(role)
        elements = _count_trained_elements(config, role)
        sizes[role] = elements * resolve_trainer_dtype(trainer).itemsize
        if role == POLICY and config.reference.every:
            averages = bool(config.reference.decay)
            sizes[EMA_REFERENCE] = elements * torch.float32.itemsize if averages else sizes[role]
    if together:
        del sizes[POLICY]
    return tuple(PublishedModel(role, size, readers[role]) for role, size in sizes.items())


def _count_trained_elements(config: RunConfig, role: str) -> int:
    """Elements of a role's model that are trained."""
    trainer, shares = config.get_trainer_config(role), config.critic.shared_coef is not None
    found = count_trained_params_from_config(
        config.get_model_path(role),
        trainer,
        has_output=role == POLICY,
        has_value=role != POLICY or shares,
    )
    return (
        count_trained_params(_load_role_skeleton(config, role), trainer) if found is None else found
    )


def _load_role_skeleton(config: RunConfig, role: str) -> "PreTrainedModel":
    """The model of a role as its trainer has it, without weights."""
    if role != POLICY:
        return load_value_skeleton(config.get_model_path(role))
    module = load_skeleton(config.get_model_path(role))
    if config.critic.shared_coef is not None:
        add_value_head(module, dtype=resolve_trainer_dtype(config.trainer))
    return module


def _get_store_bytes() -> int:
    """What Ray's object store may yet take of /dev/shm.

    Its file there is sparse: memory comes as it is written, and is not given back. How much has
    come is not known, so it counts as none. A store that is larger than /dev/shm lies elsewhere.
    """
    size = int(sum(get_object_store_bytes()))
    return size if size <= get_total_bytes() else 0
