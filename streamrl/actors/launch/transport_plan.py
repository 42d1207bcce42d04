"""Choice of the transport by which the weights of a run travel, from its models and cluster."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
import torch

from streamrl.actors.launch.ray_cluster import get_object_store_bytes
from streamrl.actors.transport.ray_calls import RAY_ACCESS
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import EMA_REFERENCE, GENERATE_CALL, POLICY
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.memory.memory_model import has_shared_weights
from streamrl.engines.models.forward import add_value_head, load_skeleton, load_value_skeleton
from streamrl.engines.models.lora import count_trained_params
from streamrl.engines.vllm.rank_groups import assign_rank_groups
from streamrl.placement.resource_demand import ResourceDemand
from streamrl.weights.config import SHARED_MEMORY
from streamrl.weights.transport import TransportSpec, load_transport
from streamrl.weights.transport_choice import (
    PublishedModel,
    TransportFacts,
    choose_transport,
    divide_shared_memory,
)
from streamrl.weights.transports.shared_memory import (
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
    """Choose the weight transport of a run on the connected Ray cluster.

    demands: actors of the run. token: distinguishes the shared memory of this run on the machine.

    Raises ConfigError, with the arithmetic, if the configured transport cannot work.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # Segments of killed runs count as free memory.
    remove_stale_segments()
    node_store_bytes = int(min(get_object_store_bytes()))
    copied_roles = _list_copied_roles(config)
    facts = TransportFacts(
        num_nodes=len(nodes),
        models=_list_published_models(config, demands),
        max_staleness=config.pipeline.max_staleness,
        shm_free_bytes=get_free_bytes(),
        object_store_bytes=_get_store_bytes(),
        num_gpus=sum(demand.requested_gpus for demand in demands),
        shares_gpus=any(demand.gpus and demand.is_in_shared_slot for demand in demands),
        copied_roles=copied_roles,
        node_store_bytes=node_store_bytes,
        queue_bytes=int(config.queue.store_share * node_store_bytes),
    )
    name, reason = choose_transport(config.weights, facts)
    if config.placement.is_hybrid:
        others = f"; others: {reason.removeprefix('weights: ')}" if facts.models else ""
        on_gpu = any(demand.gpus for demand in demands)
        reason = _describe_hybrid_transport(config, on_gpu=on_gpu) + others
    is_shared_memory = name == SHARED_MEMORY
    return TransportSpec(
        name,
        reason,
        token,
        config.run_dir.absolute(),
        config.weights.keep_versions,
        RAY_ACCESS,
        copied_roles=copied_roles,
        copies_per_node=load_transport(name).copies_per_node,
        max_bytes=divide_shared_memory(config.weights, facts) if is_shared_memory else {},
        node=nodes[0] if is_shared_memory else "",
        on_device=config.weights.on_device,
    )


def _list_copied_roles(config: RunConfig) -> frozenset[str]:
    """Return the roles whose model may change long before the next version is published."""
    changes_early = config.weights.publish_every > 1 or config.algorithm_settings.num_updates > 1
    return frozenset({EMA_REFERENCE, *(config.dataflow.trained_roles if changes_early else ())})


def _describe_hybrid_transport(config: RunConfig, *, on_gpu: bool) -> str:
    """Return a line about how weights reach the generator in the trainer's own process."""
    if config.generator.tensor_parallel > 1:
        groups = assign_rank_groups(config.trainer, config.generator.tensor_parallel)
        ranks = ", ".join("-".join(map(str, group)) for group in groups)
        return f"weights: each rank fills its shard of its group's generator; ranks {ranks}"
    if config.trainer.has_sharded_params:
        return FROM_RANKS_REASON
    shares = has_shared_weights(config.trainer, config.generator, on_gpu=on_gpu)
    return IN_PLACE_REASON if shares else WITHIN_PROCESS_REASON


def _list_published_models(
    config: RunConfig, demands: Sequence[ResourceDemand]
) -> tuple[PublishedModel, ...]:
    """Return the size and the number of followers of each published model.

    Models are the trained tensors of each role, and the EMA reference. The policy of hybrid workers
    is not published through a transport.
    """
    readers: Counter[str] = Counter()
    is_hybrid = config.placement.is_hybrid
    for demand in demands:
        if is_hybrid and demand.role == GENERATE_CALL.role:
            continue
        for role in {call.followed_role for call in demand.calls if call.followed_role}:
            readers[role] += demand.count
    sizes = {}
    for role in config.dataflow.trained_roles:
        trainer = config.get_trainer_config(role)
        elements = count_trained_params(_load_role_skeleton(config, role), trainer)
        sizes[role] = elements * resolve_trainer_dtype(trainer).itemsize
        if role == POLICY and config.reference.every:
            keeps_ema = bool(config.reference.decay)
            sizes[EMA_REFERENCE] = elements * torch.float32.itemsize if keeps_ema else sizes[role]
    if is_hybrid:
        del sizes[POLICY]
    return tuple(PublishedModel(role, size, readers[role]) for role, size in sizes.items())


def _load_role_skeleton(config: RunConfig, role: str) -> "PreTrainedModel":
    """Load a role's model without weights, to size what the trainer publishes."""
    if role != POLICY:
        return load_value_skeleton(config.get_model_path(role))
    module = load_skeleton(config.get_model_path(role))
    if config.critic.shared_coef is not None:
        add_value_head(module, dtype=resolve_trainer_dtype(config.trainer))
    return module


def _get_store_bytes() -> int:
    """Return how many bytes of /dev/shm Ray's object store may still use.

    The store is a sparse file that grows on write and never shrinks. Its current usage is unknown,
    so its whole size counts. A store larger than /dev/shm must lie elsewhere and counts as 0.
    """
    size = int(sum(get_object_store_bytes()))
    return size if size <= get_total_bytes() else 0
