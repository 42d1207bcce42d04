"""Assign the ranks of a trainer to tensor-parallel generators in the same processes.

If the trainer's tensor-parallel size is a multiple of the generator's, use HybridFlow's
zero-redundancy grouping (arXiv 2409.19256, section 5.3): a rank's trained shard lies inside its
served shard. Example: 4 training ranks, generators of 2: groups (0, 2) and (1, 3). Otherwise group
consecutive ranks, which communicate at every token, ordered so that served shards overlap the most
with trained ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.engines.trainer_config import PARAMETER_SHARDING_STAGE
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.grouping import GenerationSizes, assign_max_overlap, assign_zero_redundancy
from streamrl.resharding.layouts import ModelLayout, create_layout, partition_fsdp2
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec

if TYPE_CHECKING:
    from streamrl.engines.trainer_config import TrainerConfig


@dataclass(frozen=True)
class RankGroup:
    """Position of a trainer rank among the tensor-parallel generators in the trainer's processes.

    `groups` lists the ranks of each generator, ordered by the index of the shard they serve. The
    first rank of a group is its leader, which runs the engine. The others are peers.
    """

    rank: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return next(ranks for ranks in self.groups if self.rank in ranks)

    @property
    def group_rank(self) -> int:
        """Index of `rank` in its generator's group: its tensor-parallel rank in vLLM."""
        return self.ranks.index(self.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def leader_rank(self) -> int:
        return self.ranks[0]

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader_rank


def assign_rank_groups(trainer: "TrainerConfig", size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every generator, ordered by the index of the shard they serve.

    `size`, the generator's tensor-parallel size, divides the number of trainer ranks.
    """
    train = RankGrid(1, trainer.tensor_parallel, trainer.fsdp_size)
    if train.tp_size % size == 0:
        sizes = GenerationSizes(1, size, train.tp_size // size, train.dp_size)
        return tuple(map(tuple, assign_zero_redundancy(train, sizes).list_tp_groups()))
    train_layout = _make_train_layout(train, trainer, size)
    return tuple(
        _order_by_overlap(train_layout, range(first, first + size))
        for first in range(0, train.num_ranks, size)
    )


def _order_by_overlap(train_layout: ModelLayout, ranks: Sequence[int]) -> tuple[int, ...]:
    group_layout = ModelLayout(
        train_layout.model, {i: train_layout.shards[rank] for i, rank in enumerate(ranks)}
    )
    (order,) = assign_max_overlap(
        group_layout, GenerationSizes(1, len(ranks), 1, 1)
    ).list_tp_groups()
    return tuple(ranks[i] for i in order)


def _make_train_layout(train: RankGrid, trainer: "TrainerConfig", size: int) -> ModelLayout:
    """Return the training layout of a minimal model that stands for every decoder layer.

    It has two square matrices, split by rows and by columns; all split sizes divide their side.
    """
    side = train.num_ranks * size
    specs = tuple(TensorSpec(f"cut {dim}", (side, side), (0,), dim) for dim in range(2))
    layout = create_layout(ModelSpec(specs, 1), train.assign_ranks())
    is_sharded = trainer.zero_stage == PARAMETER_SHARDING_STAGE
    return partition_fsdp2(layout, train.assign_ranks().list_dp_groups()) if is_sharded else layout
