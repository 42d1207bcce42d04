"""What a worker of a group is: any class, some of whose methods say how their data travels."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from streamrl.controller.transfer_protocols import WorkerMesh
from streamrl.errors import ConfigError

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class WorkerContext:
    """What a worker is told of where it is; the first argument of its constructor.

    address, port: where rank 0 can be met, for torch.distributed. slot: which of the pool's slots
    it shares.
    """

    rank: int
    mesh: WorkerMesh
    address: str
    port: int
    slot: int

    @property
    def size(self) -> int:
        """Number of ranks of its group."""
        return self.mesh.size


#: The protocol of each registered method: by the function itself, whoever inherits it.
_PROTOCOL_BY_FUNCTION: dict[Callable[..., Any], str] = {}


def transfers(protocol: str) -> Callable[[Method], Method]:
    """Let a method be called on a whole group, its data handed out and collected by a protocol."""

    def register(method: Method) -> Method:
        _PROTOCOL_BY_FUNCTION[method] = protocol
        return method

    return register


@dataclass(frozen=True)
class TransferMethod:
    """A method that is called on a whole group: its protocol by name.

    knows_padding: it has a parameter `real`, by name alone, and is told there how many of its
    first rows are no padding.
    """

    protocol: str
    knows_padding: bool = False


def find_transfer_methods(worker: type) -> dict[str, TransferMethod]:
    """A class's registered methods by name, inherited ones too.

    Raises ConfigError for one that is a coroutine, or that is no method with an instance.
    """
    found = {}
    for each in reversed(worker.__mro__):
        for name, value in vars(each).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if inspect.isfunction(function) and function in _PROTOCOL_BY_FUNCTION:
                found[name] = _make_transfer_method(worker, name, _PROTOCOL_BY_FUNCTION[function])
    return found


def _make_transfer_method(worker: type, name: str, protocol: str) -> TransferMethod:
    method = inspect.getattr_static(worker, name)
    if not inspect.isfunction(method):
        told = type(method).__name__
        raise ConfigError(f"{worker.__name__}.{name}: is a {told}: must be a plain method")
    if inspect.iscoroutinefunction(method):
        raise ConfigError(f"{worker.__name__}.{name}: is async: must be a plain method")
    real = inspect.signature(method).parameters.get("real")
    return TransferMethod(protocol, real is not None and real.kind is real.KEYWORD_ONLY)
