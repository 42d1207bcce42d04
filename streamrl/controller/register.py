"""Worker classes of own loops: any class, whose methods `@transfers` opens to a worker group."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from streamrl.controller.transfer_protocols import WorkerMesh
from streamrl.errors import ConfigError

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class WorkerContext:
    """Rank of a worker in its group and address of the group; first argument of its constructor.

    address, port: rendezvous at rank 0, for torch.distributed.
    slot: index of the worker's slot in the resource pool.
    """

    rank: int
    mesh: WorkerMesh
    address: str
    port: int
    slot: int

    @property
    def size(self) -> int:
        return self.mesh.size


#: Protocol by function, so that subclasses inherit the registration.
_PROTOCOL_BY_FUNCTION: dict[Callable[..., Any], str] = {}


def transfers(protocol: str) -> Callable[[Method], Method]:
    """Mark a method of a worker as callable on a whole group, by a transfer protocol.

    protocol: name of the transfer protocol.

        @transfers("DP")
        def compute_rewards(self, batch: Batch) -> Batch: ...
    """

    def register(method: Method) -> Method:
        _PROTOCOL_BY_FUNCTION[method] = protocol
        return method

    return register


@dataclass(frozen=True)
class TransferMethod:
    """Method of a worker that a group can call, with the name of its transfer protocol.

    knows_padding: the method has a keyword-only parameter `real` and receives the number of rows
    before the padding.
    """

    protocol: str
    knows_padding: bool = False


def find_transfer_methods(worker: type) -> dict[str, TransferMethod]:
    """Return the methods of a worker class that `@transfers` marks, by name, also inherited ones.

    Raises ConfigError for a coroutine, a static method or a class method.
    """
    methods = {}
    for base in reversed(worker.__mro__):
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if inspect.isfunction(function) and function in _PROTOCOL_BY_FUNCTION:
                methods[name] = _make_transfer_method(worker, name, _PROTOCOL_BY_FUNCTION[function])
    return methods


def _make_transfer_method(worker: type, name: str, protocol: str) -> TransferMethod:
    method = inspect.getattr_static(worker, name)
    if not inspect.isfunction(method):
        kind = type(method).__name__
        raise ConfigError(f"{worker.__name__}.{name} is a {kind}: must be a plain method")
    if inspect.iscoroutinefunction(method):
        raise ConfigError(f"{worker.__name__}.{name} is async: must be a plain method")
    real = inspect.signature(method).parameters.get("real")
    return TransferMethod(protocol, real is not None and real.kind is real.KEYWORD_ONLY)
