"""Which ranks of a trainer share a generator, and which part of it each of them serves.

Where the generator is split over fewer ranks than each layer is in training, the ranks of a team
are those of the zero-redundancy grouping (arXiv:2409.19256, section 5.3): what a rank trains lies
inside what it serves. Elsewhere they are neighbours, who talk at every token, each with the part of
which it trains the most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.engines.trainer_config import PARAMETER_SHARDING_STAGE
from streamrl.resharding import (
    GenerationSizes,
    ModelLayout,
    ModelSpec,
    RankGrid,
    TensorSpec,
    assign_max_overlap,
    assign_zero_redundancy,
    create_layout,
    partition_fsdp2,
)

if TYPE_CHECKING:
    from streamrl.engines.trainer_config import TrainerConfig


@dataclass(frozen=True)
class RankGroup:
    """A rank among those that share generators: `groups` are the ranks of each, by their parts.

    The first of a team leads it: it schedules, and the others compute along.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that share the generator of this one."""
        return next(ranks for ranks in self.groups if self.rank in ranks)

    @property
    def group_rank(self) -> int:
        """Which part of the generator is here."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        """Parts the generator has."""
        return len(self.ranks)

    @property
    def leader_rank(self) -> int:
        """The rank that schedules."""
        return self.ranks[0]

    @property
    def is_leader(self) -> bool:
        """Whether it is this one."""
        return self.rank == self.leader_rank


def make_rank_group(rank: int, trainer: "TrainerConfig", size: int) -> RankGroup:
    """Where a rank of a trainer is among generators of `size` ranks each."""
    return RankGroup(rank, assign_rank_groups(trainer, size))


def assign_rank_groups(trainer: "TrainerConfig", size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of every generator, in the order of their parts; `size` divides all ranks."""
    train = RankGrid(1, trainer.tensor_parallel, trainer.dp_size)
    if train.tp_size % size == 0:
        sizes = GenerationSizes(1, size, train.tp_size // size, train.dp_size)
        return tuple(map(tuple, assign_zero_redundancy(train, sizes).list_tp_groups()))
    held = _make_train_layout(train, trainer, size)
    return tuple(
        _order_by_overlap(held, range(first, first + size))
        for first in range(0, train.num_ranks, size)
    )


def _order_by_overlap(held: ModelLayout, ranks: Sequence[int]) -> tuple[int, ...]:
    """Some ranks in an order in which they keep the most of what they have."""
    there = ModelLayout(held.model, {i: held.shards[rank] for i, rank in enumerate(ranks)})
    (order,) = assign_max_overlap(there, GenerationSizes(1, len(ranks), 1, 1)).list_tp_groups()
    return tuple(ranks[i] for i in order)


def _make_train_layout(train: RankGrid, trainer: "TrainerConfig", size: int) -> ModelLayout:
    """What each rank trains of a matrix that is cut by its rows, and of one cut by its columns."""
    side = train.num_ranks * size
    specs = tuple(TensorSpec(f"cut {dim}", (side, side), (0,), dim) for dim in range(2))
    held = create_layout(ModelSpec(specs, 1), train.assign_ranks())
    is_sharded = trainer.zero_stage == PARAMETER_SHARDING_STAGE
    return partition_fsdp2(held, train.assign_ranks().list_dp_groups()) if is_sharded else held
