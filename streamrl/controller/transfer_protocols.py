"""Transfer protocols: who of a group of workers gets which rows, and whose answers count.

The first six are those of arXiv:2409.19256, Table 3, the other two in use beside them. A protocol
is a distribute and a collect over the mesh of a group, nothing more; users add theirs with
`add_protocol`. None of them looks at data: what they hand out are references.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from streamrl.controller.batches import BatchRef, is_batch, join_batches
from streamrl.resharding import RankAssignment, RankGrid

#: What one rank is called with.
CallArguments = tuple[Any, ...]


@dataclass(frozen=True)
class WorkerMesh:
    """How the ranks of a group are laid out: for training, and for generation if it has one."""

    train: RankAssignment
    serving: RankAssignment | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.train.coordinates)


@dataclass(frozen=True)
class RankCalls:
    """What every rank is called with, None for one that is not."""

    calls: tuple[CallArguments | None, ...]


class AnswerKind(Enum):
    """What a protocol takes the answers for.

    ROWS: each rank's are what became of the rows it got. FIGURES: they are numbers about these.
    """

    ANY = "any"
    ROWS = "rows"
    METRICS = "figures"


DistributeFn = Callable[[WorkerMesh, CallArguments], RankCalls]
CollectFn = Callable[[WorkerMesh, Sequence[Any]], Any]


@dataclass(frozen=True)
class TransferProtocol:
    """A name, how arguments are handed out, and what becomes of the answers.

    collect gets one answer for each rank, in order, None of one that was not called. Batches among
    them have lost their padding. For what `answers` does see `RankAnswers`.
    """

    name: str
    distribute: DistributeFn
    collect: CollectFn
    answer_kind: AnswerKind = AnswerKind.ANY

    def distribute_calls(self, mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
        """What every rank is called with. Raises ValueError if that is not a call for each."""
        handed = self.distribute(mesh, arguments)
        if not isinstance(handed, RankCalls):
            told = type(handed).__name__
            raise ValueError(f"protocol {self.name}: its distribute gave a {told}, not a Handed")
        if len(handed.calls) != mesh.size:
            raise ValueError(
                f"protocol {self.name}: its distribute gave {len(handed.calls)} calls for"
                f" {mesh.size} ranks: must be one for each, or None"
            )
        return handed


def split_by_replica(seating: Callable[[WorkerMesh], RankAssignment]) -> DistributeFn:
    """Every replica gets a share of each batch; all its ranks the same. Other values go to all."""

    def distribute(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
        seats = seating(mesh)
        if any(map(is_batch, arguments)):
            raise ValueError("columns in a dict would go to every rank whole: hand over put(...)")
        lengths = {len(value) for value in arguments if isinstance(value, BatchRef)}
        if len(lengths) > 1:
            raise ValueError(f"batches of {sorted(lengths)} rows in one call")
        shares = [
            value.pad_to_multiple(seats.dp_size).split(seats.dp_size)
            if isinstance(value, BatchRef)
            else [value] * seats.dp_size
            for value in arguments
        ]
        calls = (tuple(share[at.dp_rank] for share in shares) for at in seats.coordinates)
        return RankCalls(tuple(calls))

    return distribute


def collect_from_replicas(seating: Callable[[WorkerMesh], RankAssignment]) -> CollectFn:
    """The answers of the last stage's first tensor rank of each replica, joined in order."""

    def collect(mesh: WorkerMesh, answers: Sequence[Any]) -> Any:
        seats = seating(mesh)
        speaks = {
            at.dp_rank: answers[rank]
            for rank, at in enumerate(seats.coordinates)
            if at.tp_rank == 0 and at.pp_rank == seats.pp_size - 1
        }
        return join_answers([speaks[replica] for replica in range(seats.dp_size)])

    return collect


def join_answers(answers: Sequence[Any]) -> Any:
    """One batch if they are batches, else the list of them."""
    if all(isinstance(answer, BatchRef) for answer in answers):
        return join_batches(answers)
    return list(answers)


def broadcast_to_all(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    """The same for every rank."""
    return RankCalls((arguments,) * mesh.size)


def scatter_lists(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    """Every argument is a list with one value for each rank."""
    for value in arguments:
        if not isinstance(value, list | tuple):
            raise ValueError(f"a {type(value).__name__}: must be a list with a value for each rank")
        if len(value) != mesh.size:
            raise ValueError(f"{len(value)} values for {mesh.size} ranks")
    return RankCalls(tuple(tuple(value[rank] for value in arguments) for rank in range(mesh.size)))


def send_to_first(mesh: WorkerMesh, arguments: CallArguments) -> RankCalls:
    """Rank 0 alone is called."""
    return RankCalls((arguments, *(None,) * (mesh.size - 1)))


def collect_from_all(mesh: WorkerMesh, answers: Sequence[Any]) -> list[Any]:
    """The answers as they are."""
    return list(answers)


def collect_from_first(mesh: WorkerMesh, answers: Sequence[Any]) -> Any:
    """Rank 0's answer."""
    return answers[0]


def collect_from_stages(mesh: WorkerMesh, answers: Sequence[Any]) -> Any:
    """The answers of the stages of the first replica, of its first tensor rank, joined in order."""
    speaks = {
        at.pp_rank: answers[rank]
        for rank, at in enumerate(mesh.train.coordinates)
        if at.tp_rank == 0 and at.dp_rank == 0
    }
    return join_answers([speaks[stage] for stage in range(mesh.train.pp_size)])


def _get_train_seating(mesh: WorkerMesh) -> RankAssignment:
    return mesh.train


def _get_serving_seating(mesh: WorkerMesh) -> RankAssignment:
    if mesh.serving is None:
        raise ValueError("P3D_ALL_MICRO_DP: the group has no seating for generation")
    return mesh.serving


def _make_flat_seating(mesh: WorkerMesh) -> RankAssignment:
    return RankGrid(1, 1, mesh.size).assign_ranks()


PROTOCOLS: dict[str, TransferProtocol] = {
    protocol.name: protocol
    for protocol in (
        TransferProtocol("ONE_TO_ALL", broadcast_to_all, collect_from_all),
        TransferProtocol("ALL_TO_ALL", scatter_lists, collect_from_all),
        TransferProtocol(
            "DP",
            split_by_replica(_make_flat_seating),
            collect_from_replicas(_make_flat_seating),
            AnswerKind.ROWS,
        ),
        TransferProtocol(
            "P3D",
            split_by_replica(_get_train_seating),
            collect_from_replicas(_get_train_seating),
            AnswerKind.ROWS,
        ),
        TransferProtocol(
            "P3D_ALL_MICRO_DP",
            split_by_replica(_get_serving_seating),
            collect_from_replicas(_get_serving_seating),
            AnswerKind.ROWS,
        ),
        TransferProtocol("P3D_PP_ONLY", broadcast_to_all, collect_from_stages),
        # Of figures there is nothing to join: every rank's are wanted.
        TransferProtocol(
            "DP_METRIC", split_by_replica(_make_flat_seating), collect_from_all, AnswerKind.METRICS
        ),
        TransferProtocol("RANK_ZERO", send_to_first, collect_from_first),
    )
}
"""By name; `add_protocol` adds a user's own."""


def add_protocol(
    name: str, distribute: DistributeFn, collect: CollectFn, answers: AnswerKind = AnswerKind.ANY
) -> TransferProtocol:
    """Make a protocol known by a name. Raises ValueError if the name is taken."""
    if name in PROTOCOLS:
        raise ValueError(f"protocol {name}: there is one of that name")
    PROTOCOLS[name] = TransferProtocol(name, distribute, collect, answers)
    return PROTOCOLS[name]
