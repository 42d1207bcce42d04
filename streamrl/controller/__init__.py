"""Controller side of own loops: the worker methods that a script can call, and their batches."""

from streamrl.controller.batches import Batch, BatchRef, RowSlice, join_batches
from streamrl.controller.register import WorkerContext, transfers
from streamrl.controller.transfer_protocols import (
    PROTOCOLS,
    AnswerKind,
    RankCalls,
    TransferProtocol,
    WorkerMesh,
    add_protocol,
)

__all__ = [
    "PROTOCOLS",
    "AnswerKind",
    "Batch",
    "BatchRef",
    "RankCalls",
    "RowSlice",
    "TransferProtocol",
    "WorkerContext",
    "WorkerMesh",
    "add_protocol",
    "join_batches",
    "transfers",
]
