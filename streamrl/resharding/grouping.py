"""Assignment of ranks to generation shards, given their training shards.

Sizes are P-T-D for training and Pg-Tg-Dg-D for generation, Dg*Pg*Tg = P*T. A micro-DP group
consists of the Dg ranks of a training replica that serve the same shard in generation.

- zero (arXiv:2409.19256, section 5.3): the training shards of a micro-DP group are disjoint and
  form exactly the generation shard, so each rank's training shard lies inside its generation shard.
- overlap: the assignment that keeps the most bytes in place, for any sizes. If the sizes divide, it
  keeps as many as zero.

Example: training 1-4-2, generation 1-2-2-2. Replica 0 has ranks 0 to 3 with quarters 0 to 3 of
every tensor; generation needs halves. zero: the ranks serve halves 0, 0, 1, 1, so every rank keeps
its quarter.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.resharding.grids import RankAssignment, RankCoordinates, RankGrid
from streamrl.resharding.layouts import ModelLayout, TensorShard, create_layout


@dataclass(frozen=True)
class GenerationSizes:
    """Sizes in generation, Pg-Tg-Dg-D: stages, tensor ranks, micro-DP replicas, training replicas.

    A training replica serves as `micro_dp_size` generation replicas.
    """

    pp_size: int
    tp_size: int
    micro_dp_size: int
    dp_size: int

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the model in generation."""
        return self.micro_dp_size * self.dp_size


def assign_zero_redundancy(train: RankGrid, generate: GenerationSizes) -> RankAssignment:
    """Assign each rank to a generation shard that contains the rank's training shard.

    A group of T/Tg tensor ranks and P/Pg stages serves the generation shard that its training
    shards form (arXiv:2409.19256, section 5.3). The sizes must divide, and the numbers of ranks and
    of data replicas agree.
    """
    tp_ratio, pp_ratio = train.tp_size // generate.tp_size, train.pp_size // generate.pp_size

    def locate(rank: int) -> RankCoordinates:
        at = train.get_coordinates(rank)
        micro_replica = at.pp_rank % pp_ratio * tp_ratio + at.tp_rank % tp_ratio
        replica = at.dp_rank * generate.micro_dp_size + micro_replica
        return RankCoordinates(at.pp_rank // pp_ratio, at.tp_rank // tp_ratio, replica)

    coordinates = tuple(map(locate, range(train.num_ranks)))
    return RankAssignment(generate.pp_size, generate.tp_size, generate.num_replicas, coordinates)


def assign_max_overlap(training_layout: ModelLayout, generate: GenerationSizes) -> RankAssignment:
    """Assign ranks to generation shards so that ranks keep the most bytes of their training shards.

    `training_layout` must have ranks 0, 1, ..., as many as `generate`. Among equal assignments,
    prefers those with the ranks of a replica near each other.
    """
    ranks = training_layout.ranks
    replica = RankGrid(generate.pp_size, generate.tp_size, 1).assign_ranks()
    shard_coords = replica.coordinates
    shards = create_layout(training_layout.model, replica).shards
    kept_bytes = _count_kept_bytes(training_layout, [shards[rank] for rank in replica.ranks])
    per_replica = len(shard_coords)
    distance = np.abs(
        np.arange(len(ranks))[:, None] // per_replica - np.arange(generate.num_replicas)[None, :]
    )
    # An assignment problem: rows are ranks, columns are (replica, shard). Any additional kept byte
    # outweighs all distances together. Dividing by the gcd keeps the floats exact, and so ties.
    scale = np.gcd.reduce(kept_bytes, axis=None) or 1
    byte_value = float(distance.max() * len(ranks) + 1)
    value = (kept_bytes // scale)[:, None, :] * byte_value - distance[:, :, None]
    # Import here: scipy.optimize takes longer than all other imports of the package.
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(value.reshape(len(ranks), -1), maximize=True)
    coordinates = []
    num_replicas_by_shard: Counter[int] = Counter()
    for column in columns.tolist():
        shard_index = column % per_replica
        coordinates.append(
            replace(shard_coords[shard_index], dp_rank=num_replicas_by_shard[shard_index])
        )
        num_replicas_by_shard[shard_index] += 1
    return RankAssignment(
        generate.pp_size, generate.tp_size, generate.num_replicas, tuple(coordinates)
    )


def _count_kept_bytes(
    training_layout: ModelLayout, generation_shards: Sequence[Mapping[str, TensorShard]]
) -> np.ndarray:
    """Return the bytes of each generation shard that each rank already has: int64 [ranks, shards].

    Ranks that share their shards (replicas) are computed once.
    """
    sizes = training_layout.model.itemsizes
    rows: dict[int, list[int]] = {}
    for rank in training_layout.ranks:
        shards = training_layout.shards[rank]
        if id(shards) not in rows:
            rows[id(shards)] = [
                sum(
                    common.numel * sizes[name]
                    for name in shards.keys() & target.keys()
                    for box in shards[name].boxes
                    for target_box in target[name].boxes
                    if (common := box.intersect(target_box))
                )
                for target in generation_shards
            ]
    return np.array([rows[id(training_layout.shards[rank])] for rank in training_layout.ranks])
