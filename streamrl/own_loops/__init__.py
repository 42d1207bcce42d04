"""Controller side of own loops: the worker methods that a script can call, and their batches."""

from streamrl.own_loops.batches import Batch, BatchRef
from streamrl.own_loops.transfer_protocols import (
    PROTOCOLS,
    TransferProtocol,
    WorkerContext,
    WorkerMesh,
    transfers,
)

__all__ = [
    "PROTOCOLS",
    "Batch",
    "BatchRef",
    "TransferProtocol",
    "WorkerContext",
    "WorkerMesh",
    "transfers",
]
