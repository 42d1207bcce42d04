"""Transfer protocols: who of a group of workers gets which rows, and whose answers count.

The first six are those of arXiv:2409.19256, Table 3, the other two in use beside them. A protocol
is a distribute and a collect over the mesh of a group, nothing more; users add theirs with
`add_protocol`. None of them looks at data: what they hand out are references.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from streamrl.controller.batches import BatchRef, is_batch, join
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
    """What every rank is called with, None for one that is not."""

    calls: tuple[Arguments | None, ...]


class Kind(Enum):
    """What a protocol takes the answers for.

    ROWS: each rank's are what became of the rows it got. FIGURES: they are numbers about these.
    """

    ANY = "any"
    ROWS = "rows"
    FIGURES = "figures"


Distribute = Callable[[Mesh, Arguments], Handed]
Collect = Callable[[Mesh, Sequence[Any]], Any]


@dataclass(frozen=True)
class Protocol:
    """A name, how arguments are handed out, and what becomes of the answers.

    collect gets one answer for each rank, in order, None of one that was not called. Batches among
    them have lost their padding. For what `answers` does see `Answers`.
    """

    name: str
    distribute: Distribute
    collect: Collect
    answers: Kind = Kind.ANY

    def hand_out(self, mesh: Mesh, arguments: Arguments) -> Handed:
        """What every rank is called with. Raises ValueError if that is not a call for each."""
        handed = self.distribute(mesh, arguments)
        if not isinstance(handed, Handed):
            told = type(handed).__name__
            raise ValueError(f"protocol {self.name}: its distribute gave a {told}, not a Handed")
        if len(handed.calls) != mesh.size:
            raise ValueError(
                f"protocol {self.name}: its distribute gave {len(handed.calls)} calls for"
                f" {mesh.size} ranks: must be one for each, or None"
            )
        return handed


def by_replica(seating: Callable[[Mesh], Seating]) -> Distribute:
    """Every replica gets a share of each batch; all its ranks the same. Other values go to all."""

    def distribute(mesh: Mesh, arguments: Arguments) -> Handed:
        seats = seating(mesh)
        if any(map(is_batch, arguments)):
            raise ValueError("columns in a dict would go to every rank whole: hand over put(...)")
        lengths = {len(value) for value in arguments if isinstance(value, BatchRef)}
        if len(lengths) > 1:
            raise ValueError(f"batches of {sorted(lengths)} rows in one call")
        shares = [
            value.padded(seats.replicas).split(seats.replicas)
            if isinstance(value, BatchRef)
            else [value] * seats.replicas
            for value in arguments
        ]
        calls = (tuple(share[at.replica] for share in shares) for at in seats.seats)
        return Handed(tuple(calls))

    return distribute


def from_replicas(seating: Callable[[Mesh], Seating]) -> Collect:
    """The answers of the last stage's first tensor rank of each replica, joined in order."""

    def collect(mesh: Mesh, answers: Sequence[Any]) -> Any:
        seats = seating(mesh)
        speaks = {
            at.replica: answers[rank]
            for rank, at in enumerate(seats.seats)
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
        if not isinstance(value, list | tuple):
            raise ValueError(f"a {type(value).__name__}: must be a list with a value for each rank")
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
        at.stage: answers[rank]
        for rank, at in enumerate(mesh.train.seats)
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
        Protocol("DP", by_replica(_flat), from_replicas(_flat), Kind.ROWS),
        Protocol("P3D", by_replica(_train), from_replicas(_train), Kind.ROWS),
        Protocol("P3D_ALL_MICRO_DP", by_replica(_serving), from_replicas(_serving), Kind.ROWS),
        Protocol("P3D_PP_ONLY", to_all, from_stages),
        # Of figures there is nothing to join: every rank's are wanted.
        Protocol("DP_METRIC", by_replica(_flat), from_all, Kind.FIGURES),
        Protocol("RANK_ZERO", to_first, from_first),
    )
}
"""By name; `add_protocol` adds a user's own."""


def add_protocol(
    name: str, distribute: Distribute, collect: Collect, answers: Kind = Kind.ANY
) -> Protocol:
    """Make a protocol known by a name. Raises ValueError if the name is taken."""
    if name in PROTOCOLS:
        raise ValueError(f"protocol {name}: there is one of that name")
    PROTOCOLS[name] = Protocol(name, distribute, collect, answers)
    return PROTOCOLS[name]
