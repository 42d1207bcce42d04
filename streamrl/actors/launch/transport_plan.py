"""Which way the weights of a run take, by what the models and the cluster are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
import torch

from streamrl.actors.launch.ray_cluster import node_stores
from streamrl.actors.transport.transport_spec import WeightTravel
from streamrl.config import RunConfig
from streamrl.dataflow import GENERATE, MOVED, POLICY
from streamrl.engines.dtypes import trained_dtype
from streamrl.engines.memory.memory_model import shares_weights
from streamrl.engines.models.forward import load_skeleton, load_value_skeleton
from streamrl.engines.models.lora import num_trained
from streamrl.engines.models.param_count import num_trained_of
from streamrl.engines.models.two_heads import add_value_head
from streamrl.engines.vllm.rank_groups import teams_of
from streamrl.placement import Demand
from streamrl.weights.config import SHARED_MEMORY
from streamrl.weights.transport_choice import Facts, Published, choose, shares
from streamrl.weights.transports.shm_segments import clear_up, free_bytes, total_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IN_PLACE = "weights: in place, as the trainer and the generator of a rank share them"
FROM_RANKS = "weights: into the generator of each rank, which lacks what other ranks keep"
WITHIN = "weights: within each process, to a generator that has a copy of its own"


def plan_travel(config: RunConfig, demands: Sequence[Demand], *, token: str) -> WeightTravel:
    """Choose a transport for a run on the cluster this process is connected to.

    `demands` are its actors. Raises ConfigError, with the arithmetic, if the one that is asked for
    is impossible.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    # What runs that were killed have left is free.
    clear_up()
    facts = Facts(
        num_nodes=len(nodes),
        published=_published(config, demands),
        max_staleness=config.pipeline.max_staleness,
        shm_free_bytes=free_bytes(),
        store_bytes=_store_bytes(),
    )
    choice = choose(config.weights, facts)
    if config.placement.is_hybrid:
        others = choice.reason.removeprefix("weights: ")
        on_gpu = any(demand.gpus for demand in demands)
        reason = _way(config, on_gpu=on_gpu)
        reason = f"{reason}; others: {others}" if facts.published else reason
        choice = replace(choice, reason=reason)
    shared = choice.transport == SHARED_MEMORY
    return WeightTravel(
        choice,
        token,
        config.run_dir.absolute(),
        config.weights.keep_versions,
        room=shares(config.weights, facts) if shared else {},
        node=nodes[0] if shared else "",
    )


def _way(config: RunConfig, *, on_gpu: bool) -> str:
    """How weights come from a rank to the generator of its process."""
    if config.generator.tensor_parallel > 1:
        return _to_teams(config)
    if config.trainer.gathers:
        return FROM_RANKS
    shares = shares_weights(config.trainer, config.generator, on_gpu=on_gpu)
    return IN_PLACE if shares else WITHIN


def _to_teams(config: RunConfig) -> str:
    teams = teams_of(config.trainer, config.generator.tensor_parallel)
    told = ", ".join("-".join(map(str, team)) for team in teams)
    return f"weights: each rank fills its part of the generator of its team; ranks {told}"


def _published(config: RunConfig, demands: Sequence[Demand]) -> tuple[Published, ...]:
    """The models that are published: what is trained of each, and a reference that moves."""
    readers: Counter[str] = Counter()
    together = config.placement.is_hybrid
    for demand in demands:
        if together and demand.role == GENERATE.role:
            continue
        for role in {call.follows for call in demand.calls if call.follows}:
            readers[role] += demand.count
    sizes = {}
    for role in config.dataflow.trained:
        trainer = config.trainer_of(role)
        elements = _num_trained(config, role)
        sizes[role] = elements * trained_dtype(trainer).itemsize
        if role == POLICY and config.reference.every:
            averages = bool(config.reference.decay)
            sizes[MOVED] = elements * torch.float32.itemsize if averages else sizes[role]
    if together:
        del sizes[POLICY]
    return tuple(Published(role, size, readers[role]) for role, size in sizes.items())


def _num_trained(config: RunConfig, role: str) -> int:
    """Elements of a role's model that are trained."""
    trainer, shares = config.trainer_of(role), config.critic.shared_coef is not None
    found = num_trained_of(
        config.model_of(role),
        trainer,
        has_output=role == POLICY,
        has_value=role != POLICY or shares,
    )
    return num_trained(_skeleton(config, role), trainer) if found is None else found


def _skeleton(config: RunConfig, role: str) -> "PreTrainedModel":
    """The model of a role as its trainer has it, without weights."""
    if role != POLICY:
        return load_value_skeleton(config.model_of(role))
    module = load_skeleton(config.model_of(role))
    if config.critic.shared_coef is not None:
        add_value_head(module, dtype=trained_dtype(config.trainer))
    return module


def _store_bytes() -> int:
    """What Ray's object store may yet take of /dev/shm.

    Its file there is sparse: memory comes as it is written, and is not given back. How much has
    come is not known, so it counts as none. A store that is larger than /dev/shm lies elsewhere.
    """
    size = int(sum(node_stores()))
    return size if size <= total_bytes() else 0
