"""The ends of a run's transport, made in the processes that need them."""

from pathlib import Path

import ray

from streamrl.actors.transport.object_store_weights import StoreInlet, StoreOutlet
from streamrl.actors.transport.transport_spec import WeightTravel
from streamrl.dataflow import POLICY
from streamrl.engines.models.forward import local_device
from streamrl.weights import Inlet, Outlet
from streamrl.weights.config import COLLECTIVE, DELTA, DISK, SHARED_MEMORY
from streamrl.weights.transports.collective import CollectiveInlet, CollectiveOutlet
from streamrl.weights.transports.delta import DeltaInlet, DeltaOutlet
from streamrl.weights.transports.disk import DiskInlet, DiskOutlet
from streamrl.weights.transports.shared_memory import SharedMemoryInlet, SharedMemoryOutlet

COLLECTIVE_TIMEOUT_S = 20.0
"""Longest that a broadcast takes beside what its bytes do, s; it takes another way then."""


def make_outlet(travel: WeightTravel, role: str, model_path: str) -> Outlet:
    """The end of the rank that publishes the weights of a role."""
    transport, keep = travel.choice.transport, travel.keep_versions
    if transport == SHARED_MEMORY:
        name, room = f"{travel.token}-{role}", travel.room[role]
        return SharedMemoryOutlet(name, StoreOutlet(), keep_versions=keep, max_bytes=room)
    if transport == DISK:
        folder = travel.run_dir / "weights" / role
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


def make_inlet(travel: WeightTravel, role: str, reader: str) -> Inlet:
    """The end of one that follows the weights of a role."""
    transport = travel.choice.transport
    if transport == SHARED_MEMORY:
        return SharedMemoryInlet(role, StoreInlet(role))
    if transport == DISK:
        return DiskInlet(role)
    if transport == COLLECTIVE:
        store, device = StoreInlet(role), local_device()
        return CollectiveInlet(reader, store, timeout_s=COLLECTIVE_TIMEOUT_S, device=device)
    return DeltaInlet(StoreInlet(role)) if transport == DELTA else StoreInlet(role)
