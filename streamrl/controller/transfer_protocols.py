"""Transfer protocols: which rank of a worker group gets which rows, and which answers count.

The first six protocols are those of HybridFlow (arXiv:2409.19256, Table 3); the last two are common
beside them. A protocol is a distribute and a collect function over the mesh of a group; users add
their own with `add_protocol`. Protocols handle references and never load data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from streamrl.controller.batches import BatchRef, is_batch, join_batches
from streamrl.resharding.grids import RankAssignment, RankGrid

#: Positional arguments of a rank's call.
CallArguments = tuple[Any, ...]


@dataclass(frozen=True)
class WorkerMesh:
    """Layout of a worker group's ranks: for training, and for generation if different."""

    train: RankAssignment
    serving: RankAssignment | None = None

    @property
    def size(self) -> int:
        return len(self.train.coordinates)


@dataclass(frozen=True)
class RankCalls:
    """Arguments of a method for every rank, in rank order; None for a rank that is not called."""

    calls: tuple[CallArguments | None, ...]


class AnswerKind(Enum):
    """Relation of a rank's answer to the rows that the rank received.

    ANY: no relation. ROWS: the answer has rows derived from the input rows. METRICS: the answer is
    a set of numbers about the input rows.
    """

    ANY = "any"
    ROWS = "rows"
    METRICS = "figures"


DistributeFn = Callable[[WorkerMesh, CallArguments], RankCalls]
CollectFn = Callable[[WorkerMesh, Sequence[Any]], Any]


@dataclass(frozen=True)
class TransferProtocol:
    """Named rule for calling a method on a worker group.

    distribute: splits the arguments of a call over the ranks.
    collect: combines the answers, in rank order, None for ranks that were not called. Padding is
    already removed.
    answer_kind: relation of the answers to the rows, by which padding is removed.
    """

    name: str
    distribute: DistributeFn
    collect: CollectFn
    answer_kind: AnswerKind = AnswerKind.ANY

    def distribute_calls(self, mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
        """Split the arguments of a call over the ranks of the mesh.

        Raises ValueError if the distribute function returns no RankCalls or not one per rank.
        """
        rank_calls = self.distribute(mesh, arguments)
        if not isinstance(rank_calls, RankCalls):
            type_name = type(rank_calls).__name__
            raise ValueError(
                f"protocol {self.name}: distribute returned a {type_name}, must be RankCalls"
            )
        if len(rank_calls.calls) != mesh.size:
            raise ValueError(
                f"protocol {self.name}: distribute returned {len(rank_calls.calls)} calls for"
                f" {mesh.size} ranks: must be a call or None for each"
            )
        return rank_calls


def split_by_replica(get_assignment: Callable[[WorkerMesh], RankAssignment]) -> DistributeFn:
    """Make a distribute function that splits the rows of batches over the model replicas.

    get_assignment: selects the layout of a mesh that defines replicas. All ranks of a replica get
    the same rows; values other than batches go to all ranks.
    """

    def distribute(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
        assignment = get_assignment(mesh)
        if any(map(is_batch, arguments)):
            raise ValueError("a dict of columns would go to every rank whole: pass put(...) of it")
        lengths = {len(value) for value in arguments if isinstance(value, BatchRef)}
        if len(lengths) > 1:
            raise ValueError(f"batches of different lengths in a call: {sorted(lengths)} rows")
        shares = [
            value.pad_to_multiple(assignment.dp_size).split(assignment.dp_size)
            if isinstance(value, BatchRef)
            else [value] * assignment.dp_size
            for value in arguments
        ]
        calls = (tuple(share[at.dp_rank] for share in shares) for at in assignment.coordinates)
        return RankCalls(tuple(calls))

    return distribute


def collect_from_replicas(get_assignment: Callable[[WorkerMesh], RankAssignment]) -> CollectFn:
    """Make a collect function that joins the rows of all model replicas.

    The answer of a replica is that of its last pipeline stage, tp_rank 0.
    get_assignment: selects the layout of a mesh that defines replicas.
    """

    def collect(mesh: WorkerMesh, answers: Sequence[Any]) -> Any:
        assignment = get_assignment(mesh)
        answer_of_replica = {
            at.dp_rank: answers[rank]
            for rank, at in enumerate(assignment.coordinates)
            if at.tp_rank == 0 and at.pp_rank == assignment.pp_size - 1
        }
        return join_answers([answer_of_replica[replica] for replica in range(assignment.dp_size)])

    return collect


def join_answers(answers: Sequence[Any]) -> Any:
    """Return one batch with the rows of all answers, or a list if any answer is no batch."""
    if all(isinstance(answer, BatchRef) for answer in answers):
        return join_batches(answers)
    return list(answers)


def broadcast_to_all(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    """Call all ranks with the same arguments."""
    return RankCalls((arguments,) * mesh.size)


def scatter_lists(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    """Call rank i with item i of every argument.

    Raises ValueError unless each argument is a list with an item per rank.
    """
    for value in arguments:
        if not isinstance(value, list | tuple):
            raise ValueError(f"a {type(value).__name__}: must be a list with a value for each rank")
        if len(value) != mesh.size:
            raise ValueError(f"{len(value)} values for {mesh.size} ranks")
    return RankCalls(tuple(tuple(value[rank] for value in arguments) for rank in range(mesh.size)))


def send_to_first(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    """Call only rank 0."""
    return RankCalls((arguments, *(None,) * (mesh.size - 1)))


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


def _get_train_assignment(mesh: WorkerMesh) -> RankAssignment:
    return mesh.train


def _get_serving_assignment(mesh: WorkerMesh) -> RankAssignment:
    if mesh.serving is None:
        raise ValueError(
            "P3D_ALL_MICRO_DP: the mesh of the group has no layout for generation (serving=...)"
        )
    return mesh.serving


def _make_flat_assignment(mesh: WorkerMesh) -> RankAssignment:
    return RankGrid(1, 1, mesh.size).assign_ranks()


PROTOCOLS: dict[str, TransferProtocol] = {
    protocol.name: protocol
    for protocol in (
        TransferProtocol("ONE_TO_ALL", broadcast_to_all, collect_from_all),
        TransferProtocol("ALL_TO_ALL", scatter_lists, collect_from_all),
        TransferProtocol(
            "DP",
            split_by_replica(_make_flat_assignment),
            collect_from_replicas(_make_flat_assignment),
            AnswerKind.ROWS,
        ),
        TransferProtocol(
            "P3D",
            split_by_replica(_get_train_assignment),
            collect_from_replicas(_get_train_assignment),
            AnswerKind.ROWS,
        ),
        TransferProtocol(
            "P3D_ALL_MICRO_DP",
            split_by_replica(_get_serving_assignment),
            collect_from_replicas(_get_serving_assignment),
            AnswerKind.ROWS,
        ),
        TransferProtocol("P3D_PP_ONLY", broadcast_to_all, collect_from_stages),
        # Metrics stay a list with an item per rank.
        TransferProtocol(
            "DP_METRIC",
            split_by_replica(_make_flat_assignment),
            collect_from_all,
            AnswerKind.METRICS,
        ),
        TransferProtocol("RANK_ZERO", send_to_first, collect_from_first),
    )
}
"""Transfer protocols by name, including those that `add_protocol` adds."""


def add_protocol(
    name: str, distribute: DistributeFn, collect: CollectFn, answers: AnswerKind = AnswerKind.ANY
) -> TransferProtocol:
    """Register a transfer protocol under a new name, for `@transfers`.

    Raises ValueError if the name is taken.
    """
    if name in PROTOCOLS:
        raise ValueError(f"protocol {name} exists already: choose another name")
    PROTOCOLS[name] = TransferProtocol(name, distribute, collect, answers)
    return PROTOCOLS[name]
