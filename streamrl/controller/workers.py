"""What a worker of a group is: any class, some of whose methods say how their data travels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from streamrl.controller.protocols import Mesh

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Place:
    """What a worker is told of where it is; the first argument of its constructor.

    address, port: where rank 0 can be met, for torch.distributed. slot: which of the pool's slots
    it shares.
    """

    rank: int
    mesh: Mesh
    address: str
    port: int
    slot: int

    @property
    def size(self) -> int:
        """Number of ranks of its group."""
        return self.mesh.size


#: The protocol of each registered method: by the function itself, whoever inherits it.
_TRANSFERS: dict[Callable[..., Any], str] = {}


def transfers(protocol: str) -> Callable[[Method], Method]:
    """Let a method be called on a whole group, its data handed out and collected by a protocol."""

    def register(method: Method) -> Method:
        _TRANSFERS[method] = protocol
        return method

    return register


def transfers_of(worker: type) -> dict[str, str]:
    """Names of a class's registered methods, inherited ones too, and their protocols."""
    found = {}
    for each in reversed(worker.__mro__):
        for name, value in vars(each).items():
            if callable(value) and value in _TRANSFERS:
                found[name] = _TRANSFERS[value]
    return found
