"""One controller, groups of workers, and how data gets from one to the other."""

from streamrl.controller.batches import Batch, BatchRef, Part, join
from streamrl.controller.protocols import PROTOCOLS, Handed, Mesh, Protocol, add_protocol

__all__ = [
    "PROTOCOLS",
    "Batch",
    "BatchRef",
    "Handed",
    "Mesh",
    "Part",
    "Protocol",
    "add_protocol",
    "join",
]
