"""One controller, groups of workers, and how data gets from one to the other."""

from streamrl.controller.batches import Batch, BatchRef, Part, join
from streamrl.controller.protocols import PROTOCOLS, Handed, Kind, Mesh, Protocol, add_protocol
from streamrl.controller.workers import Place, transfers

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
