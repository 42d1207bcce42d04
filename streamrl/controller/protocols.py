"""Transfer protocols: who of a group of workers gets which rows, and whose answers count.

The first six are those of arXiv:2409.19256, Table 3, the other two in use beside them. A protocol
is a distribute and a collect over the mesh of a group, nothing more; users add theirs with
`add_protocol`. None of them looks at data: what they hand out are references.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.controller.batches import BatchRef, join
from streamrl.resharding import Grid, Seating

#: What one rank is called with.
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Mesh:
    """How the ranks of a group are laid out: for training, and for generation if it has one."""

    train: Seating
    serving: Seating | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.train.seats)


@dataclass(frozen=True)
class Handed:
    """What every rank is called with, None for one that is not.

    rows: of the batches that were handed out; the last `padding` of them were put there to fit.
    """

    calls: tuple[Arguments | None, ...]
    rows: int = 0
    padding: int = 0


Distribute = Callable[[Mesh, Arguments], Handed]
Collect = Callable[[Mesh, Sequence[Any]], Any]


@dataclass(frozen=True)
class Protocol:
    """A name, how arguments are handed out, and what becomes of the answers.

    collect gets one answer for each rank, in order, None of one that was not called. What it
    returns loses its padding afterwards, if it is a batch.
    """

    name: str
    distribute: Distribute
    collect: Collect


def by_replica(seating: Callable[[Mesh], Seating]) -> Distribute:
    """Every replica gets a share of each batch; all its ranks the same. Other values go to all."""

    def distribute(mesh: Mesh, arguments: Arguments) -> Handed:
        seats = seating(mesh)
        lengths = {len(value) for value in arguments if isinstance(value, BatchRef)}
        if len(lengths) > 1:
            raise ValueError(f"batches of {sorted(lengths)} rows in one call")
        rows = max(lengths, default=0)
        padding = -rows % seats.replicas
        shares = [
            value.padded(seats.replicas).split(seats.replicas)
            if isinstance(value, BatchRef)
            else [value] * seats.replicas
            for value in arguments
        ]
        calls = (tuple(share[at.replica] for share in shares) for at in seats.seats)
        return Handed(tuple(calls), rows + padding, padding)

    return distribute


def from_replicas(seating: Callable[[Mesh], Seating]) -> Collect:
    """The answers of the last stage's first tensor rank of each replica, joined in order."""

    def collect(mesh: Mesh, answers: Sequence[Any]) -> Any:
        seats = seating(mesh)
        speaks = {
            at.replica: answer
            for at, answer in zip(seats.seats, answers, strict=True)
            if at.tensor == 0 and at.stage == seats.stages - 1
        }
        return joined([speaks[replica] for replica in range(seats.replicas)])

    return collect


def joined(answers: Sequence[Any]) -> Any:
    """One batch if they are batches, else the list of them."""
    if all(isinstance(answer, BatchRef) for answer in answers):
        return join(answers)
    return list(answers)


def to_all(mesh: Mesh, arguments: Arguments) -> Handed:
    """The same for every rank."""
    return Handed((arguments,) * mesh.size)


def as_given(mesh: Mesh, arguments: Arguments) -> Handed:
    """Every argument is a list with one value for each rank."""
    for value in arguments:
        if len(value) != mesh.size:
            raise ValueError(f"{len(value)} values for {mesh.size} ranks")
    return Handed(tuple(tuple(value[rank] for value in arguments) for rank in range(mesh.size)))


def to_first(mesh: Mesh, arguments: Arguments) -> Handed:
    """Rank 0 alone is called."""
    return Handed((arguments, *(None,) * (mesh.size - 1)))


def from_all(mesh: Mesh, answers: Sequence[Any]) -> list[Any]:
    """The answers as they are."""
    return list(answers)


def from_first(mesh: Mesh, answers: Sequence[Any]) -> Any:
    """Rank 0's answer."""
    return answers[0]


def from_stages(mesh: Mesh, answers: Sequence[Any]) -> Any:
    """The answers of the stages of the first replica, of its first tensor rank, joined in order."""
    speaks = {
        at.stage: answer
        for at, answer in zip(mesh.train.seats, answers, strict=True)
        if at.tensor == 0 and at.replica == 0
    }
    return joined([speaks[stage] for stage in range(mesh.train.stages)])


def _train(mesh: Mesh) -> Seating:
    return mesh.train


def _serving(mesh: Mesh) -> Seating:
    if mesh.serving is None:
        raise ValueError("P3D_ALL_MICRO_DP: the group has no seating for generation")
    return mesh.serving


def _flat(mesh: Mesh) -> Seating:
    return Grid(1, 1, mesh.size).seating()


PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol("ONE_TO_ALL", to_all, from_all),
        Protocol("ALL_TO_ALL", as_given, from_all),
        Protocol("DP", by_replica(_flat), from_replicas(_flat)),
        Protocol("P3D", by_replica(_train), from_replicas(_train)),
        Protocol("P3D_ALL_MICRO_DP", by_replica(_serving), from_replicas(_serving)),
        Protocol("P3D_PP_ONLY", to_all, from_stages),
        # Of figures there is nothing to join: every rank's are wanted.
        Protocol("DP_METRIC", by_replica(_flat), from_all),
        Protocol("RANK_ZERO", to_first, from_first),
    )
}
"""By name; `add_protocol` adds a user's own."""


def add_protocol(name: str, distribute: Distribute, collect: Collect) -> Protocol:
    """Make a protocol known by a name. Raises ValueError if the name is taken."""
    if name in PROTOCOLS:
        raise ValueError(f"protocol {name}: there is one of that name")
    PROTOCOLS[name] = Protocol(name, distribute, collect)
    return PROTOCOLS[name]


def without_padding(answer: Any, handed: int, padding: int) -> Any:
    """A batch without what became of the last `padding` of the `handed` rows; else as it is.

    A row may have become several: a prompt its group of rollouts. Raises ValueError if the rows
    that came back are no multiple of those handed out.
    """
    if not padding or not isinstance(answer, BatchRef):
        return answer
    each, rest = divmod(len(answer), handed)
    if rest:
        raise ValueError(f"{len(answer)} rows came back for {handed}: which were padding?")
    return answer.rows(0, each * (handed - padding))
