"""Factories of the weight transport's writers and readers, called in the process of each."""

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
"""Timeout of a weight broadcast beyond its transfer time; then the fallback takes over."""


def make_transport_writer(spec: TransportSpec, role: str, model_path: str) -> TransportWriter:
    """Make the writer with which rank 0 of a trained role publishes weights.

    model_path: model of the role. The disk transport copies the config and tokenizer files of it.
    """
    transport, keep_versions = spec.decision.transport, spec.keep_versions
    if transport == SHARED_MEMORY:
        name, max_bytes = f"{spec.token}-{role}", spec.max_bytes[role]
        return SharedMemoryWriter(
            name, ObjectStoreWriter(), keep_versions=keep_versions, max_bytes=max_bytes
        )
    if transport == DISK:
        folder = spec.run_dir / "weights" / role
        # Other programs may load the policy, so add its config and tokenizer files.
        model_dir = Path(model_path) if role == POLICY else None
        return DiskWriter(folder, keep_versions=keep_versions, model_dir=model_dir)
    if transport == COLLECTIVE:
        return CollectiveWriter(
            ObjectStoreWriter(),
            host=ray.util.get_node_ip_address(),
            timeout_s=COLLECTIVE_TIMEOUT_S,
            device=get_local_device(),
        )
    return DeltaWriter(ObjectStoreWriter()) if transport == DELTA else ObjectStoreWriter()


def make_transport_reader(spec: TransportSpec, role: str, reader: str) -> TransportReader:
    """Make the reader with which the actor `reader` fetches the weights of a role."""
    transport = spec.decision.transport
    if transport == SHARED_MEMORY:
        return SharedMemoryReader(role, ObjectStoreReader(role))
    if transport == DISK:
        return DiskReader(role)
    if transport == COLLECTIVE:
        store, device = ObjectStoreReader(role), get_local_device()
        return CollectiveReader(reader, store, timeout_s=COLLECTIVE_TIMEOUT_S, device=device)
    return DeltaReader(ObjectStoreReader(role)) if transport == DELTA else ObjectStoreReader(role)
