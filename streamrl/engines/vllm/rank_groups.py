"""Which ranks of a trainer share a generator, and which part of it each of them serves.

Where the generator is split over fewer ranks than each layer is in training, the ranks of a team
are those of the zero-redundancy grouping (arXiv:2409.19256, section 5.3): what a rank trains lies
inside what it serves. Elsewhere they are neighbours, who talk at every token, each with the part of
which it trains the most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.engines.trainer_config import SHARDS_PARAMETERS
from streamrl.resharding import (
    GenerationSizes,
    Grid,
    Layout,
    ModelSpec,
    TensorSpec,
    chunked,
    max_overlap,
    seated_layout,
    zero_redundancy,
)

if TYPE_CHECKING:
    from streamrl.engines.trainer_config import TrainerConfig


@dataclass(frozen=True)
class Team:
    """A rank among those that share generators: `teams` are the ranks of each, by their parts.

    The first of a team leads it: it schedules, and the others compute along.
    """

    rank: int
    teams: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that share the generator of this one."""
        return next(ranks for ranks in self.teams if self.rank in ranks)

    @property
    def place(self) -> int:
        """Which part of the generator is here."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """Parts the generator has."""
        return len(self.ranks)

    @property
    def leader(self) -> int:
        """The rank that schedules."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        """Whether it is this one."""
        return self.rank == self.leader


def team_of(rank: int, trainer: "TrainerConfig", size: int) -> Team:
    """Where a rank of a trainer is among generators of `size` ranks each."""
    return Team(rank, teams_of(trainer, size))


def teams_of(trainer: "TrainerConfig", size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of every generator, in the order of their parts; `size` divides all ranks."""
    train = Grid(1, trainer.tensor_parallel, trainer.num_shares)
    if train.tensor % size == 0:
        sizes = GenerationSizes(1, size, train.tensor // size, train.replicas)
        return tuple(map(tuple, zero_redundancy(train, sizes).tensor_groups()))
    held = _held(train, trainer, size)
    return tuple(
        _by_parts(held, range(first, first + size)) for first in range(0, train.size, size)
    )


def _by_parts(held: Layout, ranks: Sequence[int]) -> tuple[int, ...]:
    """Some ranks in an order in which they keep the most of what they have."""
    there = Layout(held.model, {i: held.shards[rank] for i, rank in enumerate(ranks)})
    (order,) = max_overlap(there, GenerationSizes(1, len(ranks), 1, 1)).tensor_groups()
    return tuple(ranks[i] for i in order)


def _held(train: Grid, trainer: "TrainerConfig", size: int) -> Layout:
    """What each rank trains of a matrix that is cut by its rows, and of one cut by its columns."""
    side = train.size * size
    specs = tuple(TensorSpec(f"cut {dim}", (side, side), (0,), dim) for dim in range(2))
    held = seated_layout(ModelSpec(specs, 1), train.seating())
    is_sharded = trainer.zero_stage == SHARDS_PARAMETERS
    return chunked(held, train.seating().data_groups()) if is_sharded else held
