"""One controller, groups of workers, and how data gets from one to the other."""

from streamrl.controller.batches import Batch, BatchRef, Part, join
from streamrl.controller.register import Place, transfers
from streamrl.controller.transfer_protocols import (
    PROTOCOLS,
    Handed,
    Kind,
    Mesh,
    Protocol,
    add_protocol,
)

__all__ = [
    "PROTOCOLS",
    "Batch",
    "BatchRef",
    "Handed",
    "Kind",
    "Mesh",
    "Part",
    "Place",
    "Protocol",
    "add_protocol",
    "join",
    "transfers",
]
