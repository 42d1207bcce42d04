"""Choice of the transport by which the weights of a run travel, from its models and cluster."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
import torch

from streamrl.actors.launch.ray_cluster import get_object_store_bytes
from streamrl.actors.transport.ray_calls import RAY_ACCESS
from streamrl.config.device_memory import load_role_skeleton
from streamrl.config.role_counts import count_ranks_per_replica
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import EMA_REFERENCE, GENERATE_CALL, POLICY
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.memory.training_memory import has_shared_weights
from streamrl.engines.models.lora import count_trained_params
from streamrl.errors import ConfigError
from streamrl.placement.resource_demand import ResourceDemand
from streamrl.weights.config import (
    AUTO,
    COLLECTIVE,
    OBJECT_STORE,
    SHARED_MEMORY,
    TRANSPORT_LABELS,
    WeightsConfig,
)
from streamrl.weights.shared_copies import measure_shared_memory
from streamrl.weights.transport import TransportSpec
from streamrl.weights.transports.shared_memory import remove_stale_segments

SHM_REMEDY = (
    "docker run --shm-size, or in Kubernetes an emptyDir of medium Memory, makes it larger, a"
    " smaller placement.object_store_mb or weights.keep_versions leaves more of it"
)


@dataclass(frozen=True)
class PublishedModel:
    """A published model: role, bytes per version, and number of followers."""

    role: str
    num_bytes: int
    num_followers: int


@dataclass(frozen=True)
class TransportFacts:
    """Facts about a cluster and a run that decide the transport.

    num_nodes: nodes that may hold publishers or followers.
    max_staleness: largest staleness of a trained token, in versions.
    shm_bytes: bytes of /dev/shm on the publishers' node that versions may take: what is free, less
      what Ray's object store and models of scorer.offload may still claim.
    node_store_bytes: size of the smallest object store of a node.
    queue_bytes: bytes of a node's object store that the queue may fill.
    copied_roles: roles of which the collective transport copies every version to the object store.
    has_gpus, shares_gpus: models compute on GPUs; several processes of the run use the same GPU.
    """

    num_nodes: int
    models: tuple[PublishedModel, ...]
    max_staleness: int
    shm_bytes: int
    node_store_bytes: float
    queue_bytes: int = 0
    copied_roles: frozenset[str] = frozenset()
    has_gpus: bool = False
    shares_gpus: bool = False

    def count_versions(self, model: PublishedModel, config: WeightsConfig) -> int:
        """Return the most versions of a model that exist at once in shared memory.

        These are the versions kept, the one being written, and those that followers still hold:
        one each, of at most max_staleness + 1 versions, as a follower further behind samples tokens
        that are too stale to train.
        """
        return config.keep_versions + 1 + min(model.num_followers, self.max_staleness + 1)


def choose_transport(config: WeightsConfig, facts: TransportFacts) -> tuple[str, str]:
    """Return the configured transport, or for auto the fastest that is possible.

    Also returns the reason, a line for the user. Raises ConfigError, with the arithmetic, if the
    configured transport is impossible.
    """
    counts = {model: facts.count_versions(model, config) for model in facts.models}
    num_bytes, terms = _sum_versions(counts)
    shm_size = _format_size(facts.shm_bytes)
    others = "Ray's object store and models at rest"
    needed = f"needs {terms}; /dev/shm has {shm_size} for it, beside {others}"
    remedy = f"; {SHM_REMEDY}" if facts.num_nodes == 1 and num_bytes > facts.shm_bytes else ""
    if facts.num_nodes > 1:
        obstacle = f"needs one node; publisher and readers are on {facts.num_nodes}"
    else:
        obstacle = needed if num_bytes > facts.shm_bytes else ""
    if config.transport == SHARED_MEMORY and obstacle:
        raise ConfigError(f"weights.transport={SHARED_MEMORY}: {obstacle}{remedy}")
    if config.transport == COLLECTIVE and facts.shares_gpus:
        raise ConfigError(
            "weights.transport=collective: NCCL needs a GPU for each process, but processes of this"
            " placement share GPUs: remove weights.transport, or choose store"
        )
    if config.transport != AUTO:
        name, reason = config.transport, "set by weights.transport"
    elif facts.num_nodes > 1 and facts.has_gpus and not facts.shares_gpus:
        name = COLLECTIVE
        reason = f"publisher and readers have a GPU each, on {facts.num_nodes} nodes"
    elif obstacle:
        name, reason = OBJECT_STORE, f"{TRANSPORT_LABELS[SHARED_MEMORY]} {obstacle}{remedy}"
    else:
        name, reason = SHARED_MEMORY, f"publisher and readers are on one node; {needed}"
    note = _describe_spilling(config, facts, name)
    return name, f"weights: {TRANSPORT_LABELS[name]} ({reason}){note}"


def _describe_spilling(config: WeightsConfig, facts: TransportFacts, transport: str) -> str:
    """Return a sum if versions and the queue may exceed a node's object store; else empty.

    The collective transport copies a version of every model to the store when followers change.
    """
    stored = {
        model: config.keep_versions + 1
        if transport == OBJECT_STORE or model.role in facts.copied_roles
        else 1
        for model in facts.models
        if transport != SHARED_MEMORY
    }
    num_bytes, terms = _sum_versions(stored)
    if not stored or num_bytes + facts.queue_bytes <= facts.node_store_bytes:
        return ""
    return (
        f"; Ray may spill to disk: needs {terms}, and {_format_size(facts.queue_bytes)} for the"
        f" queue; a node's object store has {_format_size(facts.node_store_bytes)}: raise"
        " placement.object_store_mb, or `ray start --object-store-memory` of a cluster"
    )


def _sum_versions(counts: Mapping[PublishedModel, int]) -> tuple[int, str]:
    """Return the bytes of so many versions of each model, and the sum as text."""
    num_bytes = sum(model.num_bytes * count for model, count in counts.items())
    terms = " + ".join(
        f"{count} x {_format_size(model.num_bytes)} of {model.role}"
        for model, count in counts.items()
    )
    return num_bytes, f"{_format_size(num_bytes)} = {terms}"


def divide_shared_memory(config: WeightsConfig, facts: TransportFacts) -> dict[str, int]:
    """Return the bytes of shared memory that each published model may use, by role.

    The available bytes are divided in proportion to the models' peak needs.
    """
    needs = {m.role: facts.count_versions(m, config) * m.num_bytes for m in facts.models}
    total = sum(needs.values())
    return {role: facts.shm_bytes * need // total for role, need in needs.items()}


def _format_size(num_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:g} bytes"


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
    store_bytes = get_object_store_bytes()
    # A store in /dev/shm is a sparse file that grows on write and never shrinks. Its current usage
    # is unknown, so its whole size counts. A store larger than /dev/shm must lie elsewhere.
    total_bytes, free_bytes = measure_shared_memory()
    claimed_bytes = int(sum(store_bytes)) if sum(store_bytes) <= total_bytes else 0
    claimed_bytes += sum(demand.resting_bytes for demand in demands)
    facts = TransportFacts(
        num_nodes=len(nodes),
        models=_list_published_models(config, demands),
        max_staleness=config.pipeline.max_staleness,
        shm_bytes=max(0, free_bytes - claimed_bytes),
        node_store_bytes=min(store_bytes),
        queue_bytes=int(config.queue.store_share * min(store_bytes)),
        copied_roles=_list_copied_roles(config),
        has_gpus=any(demand.gpus for demand in demands),
        shares_gpus=any(demand.gpus and demand.is_in_shared_slot for demand in demands),
    )
    name, reason = choose_transport(config.weights, facts)
    if min(store_bytes) > total_bytes:
        size = _format_size(int(min(store_bytes)))
        reason += (
            f"; Ray's object store of {size} does not fit /dev/shm and is on disk: {SHM_REMEDY}"
        )
    if config.placement.is_hybrid:
        others = f"; others: {reason.removeprefix('weights: ')}" if facts.models else ""
        reason = _describe_hybrid_transport(config, on_gpu=facts.has_gpus) + others
    is_shared_memory = name == SHARED_MEMORY
    return TransportSpec(
        name,
        reason,
        token,
        config.weights.keep_versions,
        RAY_ACCESS,
        copied_roles=facts.copied_roles,
        max_bytes=divide_shared_memory(config.weights, facts) if is_shared_memory else {},
        node=nodes[0] if is_shared_memory else "",
    )


def _list_copied_roles(config: RunConfig) -> frozenset[str]:
    """Return the roles whose model may change long before the next version is published."""
    changes_early = config.weights.publish_every > 1 or config.algorithm_settings.num_updates > 1
    return frozenset({EMA_REFERENCE, *(config.dataflow.trained_roles if changes_early else ())})


def _describe_hybrid_transport(config: RunConfig, *, on_gpu: bool) -> str:
    """Return a line about how weights reach the generator in the trainer's own process."""
    is_whole = config.trainer.tensor_parallel == 1
    if is_whole and has_shared_weights(config.trainer, config.generator, on_gpu=on_gpu):
        return "weights: in place, as the trainer and the generator of a rank share them"
    return "weights: into the generator of each rank, where it does not share them"


def _list_published_models(
    config: RunConfig, demands: Sequence[ResourceDemand]
) -> tuple[PublishedModel, ...]:
    """Return the size and the number of followers of each published model.

    Models are the trained tensors of each role, and the EMA reference. The policy of hybrid workers
    is not published through a transport.
    """
    followers: Counter[str] = Counter()
    is_hybrid = config.placement.is_hybrid
    for demand in demands:
        if is_hybrid and demand.role == GENERATE_CALL.role:
            continue
        for role in {call.followed_role for call in demand.calls if call.followed_role}:
            # Of a copy's ranks, only the leader receives versions.
            ranks = count_ranks_per_replica(config, demand.calls[0].role)
            followers[role] += demand.count // ranks
    sizes = {}
    for role in config.dataflow.trained_roles:
        if role not in config.dataflow.followed_roles:
            continue
        trainer = config.get_trainer_config(role)
        elements = count_trained_params(load_role_skeleton(config, role), trainer)
        sizes[role] = elements * resolve_trainer_dtype(trainer).itemsize
        if role == POLICY and config.reference.every:
            keeps_ema = bool(config.reference.decay)
            sizes[EMA_REFERENCE] = elements * torch.float32.itemsize if keeps_ema else sizes[role]
    if is_hybrid:
        del sizes[POLICY]
    return tuple(PublishedModel(role, size, followers[role]) for role, size in sizes.items())
