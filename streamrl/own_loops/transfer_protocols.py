"""Transfer protocols: which rank of a worker group gets which rows, and which answers count.

`@transfers` gives a method of a worker class its protocol.

The first six protocols are those of HybridFlow (arXiv:2409.19256, Table 3). A protocol is a
distribute and a collect function over the mesh of a group. Protocols handle references and never
load data.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from streamrl.errors import ConfigError
from streamrl.own_loops.batches import BatchRef, is_batch, join_batches
from streamrl.resharding.grids import RankAssignment, RankGrid

CallArguments = tuple[Any, ...]
"""Positional arguments of a rank's call."""
Method = TypeVar("Method", bound=Callable[..., Any])
RankCalls = Sequence[CallArguments | None]
"""Arguments of a method for every rank, in rank order; None for a rank that is not called."""


@dataclass(frozen=True)
class WorkerMesh:
    """Layout of a worker group's ranks: for training, and for generation if different."""

    train: RankAssignment
    serving: RankAssignment | None = None

    @property
    def size(self) -> int:
        return len(self.train.coordinates)


@dataclass(frozen=True)
class WorkerContext:
    """Rank of a worker in its group and address of the group; first argument of its constructor.

    address, port: rendezvous at rank 0, for torch.distributed.
    """

    rank: int
    mesh: WorkerMesh
    address: str
    port: int

    @property
    def size(self) -> int:
        return self.mesh.size


DistributeFn = Callable[[WorkerMesh, CallArguments], RankCalls]
CollectFn = Callable[[WorkerMesh, Sequence[Any]], Any]
SelectLayout = Callable[[WorkerMesh], RankAssignment]


@dataclass(frozen=True)
class TransferProtocol:
    """Rule for calling a method on a worker group.

    distribute: splits the arguments of a call over the ranks.
    collect: combines the answers, in rank order, None for ranks that were not called.
    keeps_rows: batches in the answers have rows derived from the input rows, as many for each.
    timeout_s: deadline of a call, where it is longer than the group's.
    """

    distribute: DistributeFn
    collect: CollectFn
    keeps_rows: bool = False
    timeout_s: float = 0.0

    def check_rows(self, calls: RankCalls, answers: Sequence[Any]) -> None:
        """Raise ValueError unless every rank returns the same number of rows per input row.

        A method may return several (a prompt gives a group of rollouts). Totals may match although
        single ranks are wrong.
        """
        if not self.keeps_rows:
            return
        multiples = {
            len(answer) / len(value)
            for arguments, answer in zip(calls, answers, strict=True)
            for value in arguments or ()
            if isinstance(value, BatchRef) and len(value) and isinstance(answer, BatchRef)
        }
        if len(multiples) > 1 or any(m < 1 or m % 1 for m in multiples):
            rule = "must be a whole number, the same on every rank"
            raise ValueError(f"{sorted(multiples)} rows returned per input row: {rule}")


def split_rows(get_assignment: SelectLayout) -> TransferProtocol:
    """Make the protocol that splits the rows of batches over the model replicas of a layout.

    get_assignment: selects the layout of a mesh. All ranks of a replica get the same rows; the
    first replicas may get one row more. Values other than batches go to all ranks. The answer of a
    replica is that of its last pipeline stage, tp_rank 0; the rows of all replicas are joined.
    """

    def distribute(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
        assignment = get_assignment(mesh)
        if any(map(is_batch, arguments)):
            raise ValueError("a dict of columns would go to every rank whole: pass put(...) of it")
        lengths = {len(value) for value in arguments if isinstance(value, BatchRef)}
        if len(lengths) > 1:
            raise ValueError(f"batches of different lengths in a call: {sorted(lengths)} rows")
        num_replicas = assignment.dp_size
        shares = [
            value.split(num_replicas) if isinstance(value, BatchRef) else [value] * num_replicas
            for value in arguments
        ]
        return [tuple(share[at.dp_rank] for share in shares) for at in assignment.coordinates]

    def collect(mesh: WorkerMesh, answers: Sequence[Any]) -> Any:
        assignment = get_assignment(mesh)
        answer_of_replica = {
            at.dp_rank: answers[rank]
            for rank, at in enumerate(assignment.coordinates)
            if at.tp_rank == 0 and at.pp_rank == assignment.pp_size - 1
        }
        return join_answers([answer_of_replica[replica] for replica in range(assignment.dp_size)])

    return TransferProtocol(distribute, collect, keeps_rows=True)


def join_answers(answers: Sequence[Any]) -> Any:
    """Return one batch with the rows of all answers, or a list if any answer is no batch.

    The answer {} of a rank without rows counts as a batch without rows.
    """
    batches = [answer for answer in answers if isinstance(answer, BatchRef)]
    if batches and all(isinstance(a, BatchRef) or (isinstance(a, dict) and not a) for a in answers):
        return join_batches(batches)
    return list(answers)


def broadcast_to_all(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    return [arguments] * mesh.size


def scatter_lists(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    """Call rank i with item i of every argument.

    Raises ValueError unless each argument is a list with an item per rank.
    """
    for value in arguments:
        if not isinstance(value, list | tuple):
            raise ValueError(f"a {type(value).__name__}: must be a list with a value for each rank")
        if len(value) != mesh.size:
            raise ValueError(f"{len(value)} values for {mesh.size} ranks")
    return [tuple(value[rank] for value in arguments) for rank in range(mesh.size)]


def send_to_first(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    return [arguments] + [None] * (mesh.size - 1)


def collect_from_all(mesh: WorkerMesh, answers: Sequence[Any]) -> list[Any]:
    return list(answers)


def collect_from_first(mesh: WorkerMesh, answers: Sequence[Any]) -> Any:
    return answers[0]


def collect_from_stages(mesh: WorkerMesh, answers: Sequence[Any]) -> Any:
    """Join the answers of all pipeline stages of the first model replica, in stage order.

    The answer of a stage is that of its tp_rank 0.
    """
    answer_of_stage = {
        at.pp_rank: answers[rank]
        for rank, at in enumerate(mesh.train.coordinates)
        if at.tp_rank == 0 and at.dp_rank == 0
    }
    return join_answers([answer_of_stage[stage] for stage in range(mesh.train.pp_size)])


def _get_serving_layout(mesh: WorkerMesh) -> RankAssignment:
    if mesh.serving is None:
        raise ValueError(
            "P3D_ALL_MICRO_DP: the mesh of the group has no layout for generation (serving=...)"
        )
    return mesh.serving


SPLIT_OVER_ALL = split_rows(lambda mesh: RankGrid(1, 1, mesh.size).assign_ranks())
PROTOCOLS: dict[str, TransferProtocol] = {
    "ONE_TO_ALL": TransferProtocol(broadcast_to_all, collect_from_all),
    "ALL_TO_ALL": TransferProtocol(scatter_lists, collect_from_all),
    "DP": SPLIT_OVER_ALL,
    "P3D": split_rows(attrgetter("train")),
    "P3D_ALL_MICRO_DP": split_rows(_get_serving_layout),
    "P3D_PP_ONLY": TransferProtocol(broadcast_to_all, collect_from_stages),
    # Metrics stay a list with an item per rank.
    "DP_METRIC": TransferProtocol(SPLIT_OVER_ALL.distribute, collect_from_all),
    "RANK_ZERO": TransferProtocol(send_to_first, collect_from_first),
    "TO_ALL_FROM_FIRST": TransferProtocol(broadcast_to_all, collect_from_first),
}

#: By function, so that subclasses inherit the registration.
_PROTOCOL_BY_FUNCTION: dict[Callable[..., Any], TransferProtocol] = {}


def transfers(
    protocol: str | TransferProtocol, *, timeout_s: float = 0.0
) -> Callable[[Method], Method]:
    """Mark a method of a worker as callable on a whole group, by a transfer protocol.

    protocol: a name in PROTOCOLS, or a protocol of your own. timeout_s: deadline of a call, where
    it is longer than the group's. Raises ConfigError for other names, and for a coroutine.

        @transfers("DP")
        def compute_rewards(self, batch: Batch) -> Batch: ...
    """
    if isinstance(protocol, str):
        if protocol not in PROTOCOLS:
            raise ConfigError(f"protocol {protocol}: must be one of {', '.join(PROTOCOLS)}")
        protocol = PROTOCOLS[protocol]
    protocol = replace(protocol, timeout_s=max(timeout_s, protocol.timeout_s))

    def register(method: Method) -> Method:
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{method.__qualname__} is async: must be a plain method")
        _PROTOCOL_BY_FUNCTION[method] = protocol
        return method

    return register


def find_transfer_methods(worker: type) -> dict[str, TransferProtocol]:
    """Return the protocols of the methods that `@transfers` marks, by name, also inherited ones."""
    return {
        name: _PROTOCOL_BY_FUNCTION[value]
        for base in reversed(worker.__mro__)
        for name, value in vars(base).items()
        if inspect.isfunction(value) and value in _PROTOCOL_BY_FUNCTION
    }
