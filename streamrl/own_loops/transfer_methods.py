"""Methods of worker classes that a group can call, and their calls."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from streamrl.errors import ConfigError
from streamrl.own_loops.batches import BatchRef
from streamrl.own_loops.transfer_protocols import (
    PROTOCOLS,
    CallArguments,
    RankCalls,
    TransferProtocol,
    WorkerMesh,
)

Method = TypeVar("Method", bound=Callable[..., Any])
#: By function, so that subclasses inherit the registration.
_PROTOCOL_BY_FUNCTION: dict[Callable[..., Any], TransferProtocol] = {}


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


def transfers(protocol: str | TransferProtocol) -> Callable[[Method], Method]:
    """Mark a method of a worker as callable on a whole group, by a transfer protocol.

    protocol: a name in PROTOCOLS, or a protocol of your own. Raises ConfigError for other names.

        @transfers("DP")
        def compute_rewards(self, batch: Batch) -> Batch: ...
    """
    if isinstance(protocol, str):
        if protocol not in PROTOCOLS:
            raise ConfigError(f"protocol {protocol}: must be one of {', '.join(PROTOCOLS)}")
        protocol = PROTOCOLS[protocol]

    def register(method: Method) -> Method:
        _PROTOCOL_BY_FUNCTION[method] = protocol
        return method

    return register


@dataclass(frozen=True)
class TransferMethod:
    """Method of a worker class that a group can call."""

    worker: str
    name: str
    protocol: TransferProtocol

    def get_rank_name(self, rank: int) -> str:
        """Return the name of a rank's call for errors, such as CriticWorker-1.compute_values."""
        return f"{self.worker}-{rank}.{self.name}"

    def distribute_calls(self, mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
        """Return the arguments of each rank's call.

        Raises ValueError if the protocol refuses them or makes no call or None for each rank.
        """
        name = f"{self.worker}.{self.name}"
        try:
            calls = self.protocol.distribute(mesh, arguments)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if len(calls) != mesh.size or not all(isinstance(c, tuple | None) for c in calls):
            raise ValueError(
                f"{name}: the protocol distributed {len(calls)} calls to {mesh.size} ranks: must be"
                " a tuple of arguments or None for each"
            )
        return calls

    def collect_answers(self, mesh: WorkerMesh, calls: RankCalls, answers: Sequence[Any]) -> Any:
        """Combine the answers of all ranks by the protocol.

        A method may return several rows per input row (a prompt gives a group of rollouts), as many
        on every rank. Raises ValueError for other numbers of rows.
        """
        if self.protocol.keeps_rows:
            self._check_rows(calls, answers)
        return self.protocol.collect(mesh, answers)

    def _check_rows(self, calls: RankCalls, answers: Sequence[Any]) -> None:
        row_multiple: int | None = None
        for rank, (arguments, answer) in enumerate(zip(calls, answers, strict=True)):
            lengths = [len(value) for value in arguments or () if isinstance(value, BatchRef)]
            if not lengths or not isinstance(answer, BatchRef):
                continue
            name, num_rows, count = self.get_rank_name(rank), max(lengths), len(answer)
            multiple, remainder = divmod(count, num_rows) if num_rows else (1, count)
            if remainder or not multiple:
                raise ValueError(
                    f"{name}: {count} rows returned for {num_rows}: must be a multiple, the same on"
                    " every rank"
                )
            if num_rows and row_multiple not in (None, multiple):
                raise ValueError(
                    f"{name}: {multiple} rows returned per input row, but {row_multiple} by another"
                    " rank: must be the same on every rank"
                )
            row_multiple = multiple if num_rows else row_multiple


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


def _make_transfer_method(worker: type, name: str, protocol: TransferProtocol) -> TransferMethod:
    method = inspect.getattr_static(worker, name)
    if not inspect.isfunction(method):
        kind = type(method).__name__
        raise ConfigError(f"{worker.__name__}.{name} is a {kind}: must be a plain method")
    if inspect.iscoroutinefunction(method):
        raise ConfigError(f"{worker.__name__}.{name} is async: must be a plain method")
    return TransferMethod(worker.__name__, name, protocol)
