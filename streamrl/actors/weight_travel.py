"""How the weights of a run travel: the transport that was chosen, and its two ends."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray
import torch

from streamrl.actors.cluster import node_stores
from streamrl.actors.store_transport import StoreInlet, StoreOutlet
from streamrl.config import RunConfig
from streamrl.dataflow import GENERATE, MOVED, POLICY
from streamrl.engines.forward import load_skeleton, load_value_skeleton, local_device
from streamrl.engines.held_memory import shares_weights
from streamrl.engines.lora import num_trained
from streamrl.engines.teams import teams_of
from streamrl.engines.two_heads import add_value_head
from streamrl.placement import Demand
from streamrl.weights import Inlet, Outlet
from streamrl.weights.choice import Choice, Facts, Published, choose, shares
from streamrl.weights.collective import CollectiveInlet, CollectiveOutlet
from streamrl.weights.config import COLLECTIVE, DELTA, DISK, SHARED_MEMORY, STORE
from streamrl.weights.delta import DeltaInlet, DeltaOutlet
from streamrl.weights.disk import DiskInlet, DiskOutlet
from streamrl.weights.segments import PREFIX, SHARED_MEMORY_DIR, clear_up, free_bytes, total_bytes
from streamrl.weights.shared_memory import SharedMemoryInlet, SharedMemoryOutlet
from streamrl.weights.spread import Spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

END_S = 2.0
"""Longest that ended publishers are waited for, s; the next publisher clears up after others."""
COLLECTIVE_TIMEOUT_S = 20.0
"""Longest that a broadcast takes beside what its bytes do, s; it takes another way then."""


@dataclass(frozen=True)
class WeightTravel:
    """Makes the ends of a run's transport, in the processes that need them.

    `token` tells the run from others on the machine. `room`: most bytes of shared memory for each
    role that is published. `node`: where all have to be who publish or follow; empty for anywhere.
    """

    choice: Choice
    token: str
    run_dir: Path
    keep_versions: int
    room: Mapping[str, int]
    node: str = ""

    def outlet(self, role: str, model_path: str) -> Outlet:
        """The end of the rank that publishes the weights of a role."""
        transport, keep = self.choice.transport, self.keep_versions
        if transport == SHARED_MEMORY:
            name, room = f"{self.token}-{role}", self.room[role]
            return SharedMemoryOutlet(name, StoreOutlet(), keep_versions=keep, max_bytes=room)
        if transport == DISK:
            folder = self.run_dir / "weights" / role
            # Others can load what is a whole model; a critic or a reference is nobody else's.
            files = Path(model_path) if role == POLICY else None
            return DiskOutlet(folder, keep_versions=keep, model_dir=files)
        if transport == COLLECTIVE:
            return CollectiveOutlet(
                StoreOutlet(),
                host=ray.util.get_node_ip_address(),
                timeout_s=COLLECTIVE_TIMEOUT_S,
                device=local_device(),
            )
        return DeltaOutlet(StoreOutlet()) if transport == DELTA else StoreOutlet()

    def spread(self, origin: str) -> Spread | None:
        """Who may pull from whom, with publishers on the node `origin`.

        Where every node takes a copy of its own, some wait for others that have one.
        """
        return Spread(origin) if self.choice.transport in (STORE, DELTA) else None

    def end(self) -> None:
        """Take away what publishers that were ended have left in memory."""
        if self.choice.transport != SHARED_MEMORY:
            return
        deadline = time.monotonic() + END_S
        # They may not be quite gone: until then what they hold is theirs.
        while any(SHARED_MEMORY_DIR.glob(f"{PREFIX}{self.token}*")):
            clear_up()
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def inlet(self, role: str, reader: str) -> Inlet:
        """The end of one that follows the weights of a role."""
        transport = self.choice.transport
        if transport == SHARED_MEMORY:
            return SharedMemoryInlet(role, StoreInlet(role))
        if transport == DISK:
            return DiskInlet(role)
        if transport == COLLECTIVE:
            store, device = StoreInlet(role), local_device()
            return CollectiveInlet(reader, store, timeout_s=COLLECTIVE_TIMEOUT_S, device=device)
        return DeltaInlet(StoreInlet(role)) if transport == DELTA else StoreInlet(role)


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
        elements = num_trained(_skeleton(config, role), trainer)
        sizes[role] = elements * trainer.torch_dtype.itemsize
        if role == POLICY and config.reference.every:
            averages = bool(config.reference.decay)
            sizes[MOVED] = elements * torch.float32.itemsize if averages else sizes[role]
    if together:
        del sizes[POLICY]
    return tuple(Published(role, size, readers[role]) for role, size in sizes.items())


def _skeleton(config: RunConfig, role: str) -> "PreTrainedModel":
    """The model of a role as its trainer has it, without weights."""
    if role != POLICY:
        return load_value_skeleton(config.model_of(role))
    module = load_skeleton(config.model_of(role))
    if config.critic.shared_coef is not None:
        add_value_head(module, dtype=config.trainer.torch_dtype)
    return module


def _store_bytes() -> int:
    """What Ray's object store may yet take of /dev/shm.

    Its file there is sparse: memory comes as it is written, and is not given back. How much has
    come is not known, so it counts as none. A store that is larger than /dev/shm lies elsewhere.
    """
    size = int(sum(node_stores()))
    return size if size <= total_bytes() else 0
