"""The ends of a run's transport, made in the processes that need them."""

from pathlib import Path

import ray

from streamrl.actors.transport.object_store_weights import ObjectStoreReader, ObjectStoreWriter
from streamrl.actors.transport.transport_spec import TransportSpec
from streamrl.dataflow import POLICY
from streamrl.engines.models.forward import get_local_device
from streamrl.weights import TransportReader, TransportWriter
from streamrl.weights.config import COLLECTIVE, DELTA, DISK, SHARED_MEMORY
from streamrl.weights.transports.collective import CollectiveReader, CollectiveWriter
from streamrl.weights.transports.delta import DeltaReader, DeltaWriter
from streamrl.weights.transports.disk import DiskReader, DiskWriter
from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter

COLLECTIVE_TIMEOUT_S = 20.0
"""Longest that a broadcast takes beside what its bytes do, s; it takes another way then."""


def make_transport_writer(travel: TransportSpec, role: str, model_path: str) -> TransportWriter:
    """The end of the rank that publishes the weights of a role."""
    transport, keep = travel.decision.transport, travel.keep_versions
    if transport == SHARED_MEMORY:
        name, room = f"{travel.token}-{role}", travel.max_bytes[role]
        return SharedMemoryWriter(name, ObjectStoreWriter(), keep_versions=keep, max_bytes=room)
    if transport == DISK:
        folder = travel.run_dir / "weights" / role
        # Others can load what is a whole model; a critic or a reference is nobody else's.
        files = Path(model_path) if role == POLICY else None
        return DiskWriter(folder, keep_versions=keep, model_dir=files)
    if transport == COLLECTIVE:
        return CollectiveWriter(
            ObjectStoreWriter(),
            host=ray.util.get_node_ip_address(),
            timeout_s=COLLECTIVE_TIMEOUT_S,
            device=get_local_device(),
        )
    return DeltaWriter(ObjectStoreWriter()) if transport == DELTA else ObjectStoreWriter()


def make_transport_reader(travel: TransportSpec, role: str, reader: str) -> TransportReader:
    """The end of one that follows the weights of a role."""
    transport = travel.decision.transport
    if transport == SHARED_MEMORY:
        return SharedMemoryReader(role, ObjectStoreReader(role))
    if transport == DISK:
        return DiskReader(role)
    if transport == COLLECTIVE:
        store, device = ObjectStoreReader(role), get_local_device()
        return CollectiveReader(reader, store, timeout_s=COLLECTIVE_TIMEOUT_S, device=device)
    return DeltaReader(ObjectStoreReader(role)) if transport == DELTA else ObjectStoreReader(role)
