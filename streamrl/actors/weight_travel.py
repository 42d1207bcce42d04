"""How the weights of a run travel: the transport that was chosen, and its two ends."""

import time
from dataclasses import dataclass
from pathlib import Path

import ray

from streamrl.actors.store_transport import StoreInlet, StoreOutlet
from streamrl.config import RunConfig
from streamrl.dataflow import POLICY
from streamrl.engines.forward import local_device
from streamrl.weights import Inlet, Outlet
from streamrl.weights.choice import Choice, Facts, choose
from streamrl.weights.collective import CollectiveInlet, CollectiveOutlet
from streamrl.weights.config import COLLECTIVE, DELTA, DISK, SHARED_MEMORY
from streamrl.weights.delta import DeltaInlet, DeltaOutlet
from streamrl.weights.disk import DiskInlet, DiskOutlet
from streamrl.weights.segments import PREFIX, SHARED_MEMORY_DIR, clear_up, free_bytes
from streamrl.weights.shared_memory import SharedMemoryInlet, SharedMemoryOutlet

END_S = 2.0
"""Longest that ended publishers are waited for, s; the next publisher clears up after others."""
COLLECTIVE_TIMEOUT_S = 20.0
"""Longest that a broadcast waits for a member, s; it takes another way then."""


@dataclass(frozen=True)
class WeightTravel:
    """Makes the ends of a run's transport, in the processes that need them.

    `token` tells the run from others on the machine.
    """

    choice: Choice
    token: str
    run_dir: Path
    keep_versions: int

    def outlet(self, role: str, model_path: str) -> Outlet:
        """The end of the rank that publishes the weights of a role."""
        transport, keep = self.choice.transport, self.keep_versions
        if transport == SHARED_MEMORY:
            return SharedMemoryOutlet(f"{self.token}-{role}", StoreOutlet(), keep_versions=keep)
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


def plan_travel(config: RunConfig, *, token: str) -> WeightTravel:
    """Choose a transport for a run on the cluster this process is connected to.

    Raises ConfigError, with the arithmetic, if the one that is asked for is impossible.
    """
    published = [*config.dataflow.trained, *([POLICY] if config.reference.every else [])]
    facts = Facts(
        num_nodes=sum(node["Alive"] for node in ray.nodes()),
        readers=config.generator.replicas,
        model_bytes=sum(_model_bytes(config.model_of(role)) for role in published),
        shm_free_bytes=free_bytes(),
    )
    keep = config.weights.keep_versions
    choice = choose(config.weights, facts)
    return WeightTravel(choice, token, config.run_dir.absolute(), keep)


def _model_bytes(model_path: str) -> int:
    """Size of the parameters in a model directory."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
