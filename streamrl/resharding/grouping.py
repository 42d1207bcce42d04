"""Which rank serves which part of the model in generation, given how training holds it.

Sizes are P-T-D for training and Pg-Tg-Dg-D for generation, Dg*Pg*Tg = P*T. A micro-DP group is the
Dg ranks of one training replica that serve the same part in generation.

- vanilla (HybridFlow-V): consecutive ranks serve the parts of a replica in turn.
- zero (arXiv:2409.19256, section 5.3): the training shards of a micro-DP group are disjoint and
  together exactly the part it serves, so that each rank's own shard lies inside it.
- overlap: the assignment with the most bytes that stay where they are, for any sizes. Where sizes
  divide it keeps as much as zero does.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.resharding.grids import RankAssignment, RankCoordinates, RankGrid
from streamrl.resharding.layouts import ModelLayout, TensorShard, create_layout

GROUPINGS = ("zero", "vanilla", "overlap")


@dataclass(frozen=True)
class GenerationSizes:
    """Pg-Tg-Dg-D: stages, tensor ranks, micro-DP replicas, and training replicas."""

    pp_size: int
    tp_size: int
    micro_dp_size: int
    dp_size: int

    def __post_init__(self) -> None:
        if min(self.pp_size, self.tp_size, self.micro_dp_size, self.dp_size) < 1:
            raise ValueError(f"generation {self}: must be at least 1 in each")

    @classmethod
    def from_text(cls, text: str) -> "GenerationSizes":
        """The sizes of "Pg-Tg-Dg-D". Raises ValueError."""
        parts = text.split("-")
        if len(parts) != len("PTGD") or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{text}: must be pipeline-tensor-microdata-data, as in 1-2-2-2")
        return cls(*map(int, parts))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.tp_size * self.micro_dp_size * self.dp_size

    @property
    def num_replicas(self) -> int:
        """Replicas of the model in generation."""
        return self.micro_dp_size * self.dp_size

    def __str__(self) -> str:
        return f"{self.pp_size}-{self.tp_size}-{self.micro_dp_size}-{self.dp_size}"


@dataclass(frozen=True)
class _SplitRatio:
    """How many training tensor ranks (a) and stages (c) make one of generation."""

    tp_ratio: int
    pp_ratio: int

    @classmethod
    def from_sizes(cls, train: RankGrid, generate: GenerationSizes, grouping: str) -> "_SplitRatio":
        validate_sizes(train, generate)
        divide = not (train.tp_size % generate.tp_size or train.pp_size % generate.pp_size)
        if not divide or train.dp_size != generate.dp_size:
            raise ValueError(
                f"grouping {grouping}: {generate} must divide {train} in stages and tensor ranks"
                " and have as many data replicas; grouping overlap takes any sizes"
            )
        return cls(train.tp_size // generate.tp_size, train.pp_size // generate.pp_size)


def validate_sizes(train: RankGrid, generate: GenerationSizes) -> None:
    """Raises ValueError unless both use the same number of ranks."""
    if train.num_ranks != generate.num_ranks:
        raise ValueError(
            f"training {train} has {train.num_ranks} ranks, generation {generate} has"
            f" {generate.num_ranks}"
        )


def assign_vanilla(train: RankGrid, generate: GenerationSizes) -> RankAssignment:
    """Consecutive ranks of a replica serve consecutive tensor shards, then stages."""
    _SplitRatio.from_sizes(train, generate, "vanilla")

    def seat(at: RankCoordinates) -> RankCoordinates:
        within = at.pp_rank * train.tp_size + at.tp_rank
        stage, tensor = divmod(within, generate.tp_size)
        micro, stage = divmod(stage, generate.pp_size)
        return RankCoordinates(stage, tensor, at.dp_rank * generate.micro_dp_size + micro)

    return _assign_ranks(train, generate, seat)


def assign_zero_redundancy(train: RankGrid, generate: GenerationSizes) -> RankAssignment:
    """Tensor ranks at intervals of T/Tg, stages at intervals of P/Pg."""
    ratio = _SplitRatio.from_sizes(train, generate, "zero")

    def seat(at: RankCoordinates) -> RankCoordinates:
        micro = at.pp_rank % ratio.pp_ratio * ratio.tp_ratio + at.tp_rank % ratio.tp_ratio
        return RankCoordinates(
            at.pp_rank // ratio.pp_ratio,
            at.tp_rank // ratio.tp_ratio,
            at.dp_rank * generate.micro_dp_size + micro,
        )

    return _assign_ranks(train, generate, seat)


def _assign_ranks(
    train: RankGrid, generate: GenerationSizes, seat: Callable[[RankCoordinates], RankCoordinates]
) -> RankAssignment:
    seats = tuple(seat(train.get_coordinates(rank)) for rank in range(train.num_ranks))
    return RankAssignment(generate.pp_size, generate.tp_size, generate.num_replicas, seats)


def assign_max_overlap(held: ModelLayout, generate: GenerationSizes) -> RankAssignment:
    """The seating whose ranks together keep the most bytes of what they hold in training.

    held: the training layout, of ranks 0, 1, ... Of several such seatings one is taken where the
    ranks of a replica are near each other. Raises ValueError if the sizes do not fit.
    """
    ranks = held.ranks
    if ranks != list(range(generate.num_ranks)):
        raise ValueError(f"generation {generate} has {generate.num_ranks} ranks, not {len(ranks)}")
    parts = [
        RankCoordinates(stage, tensor, 0)
        for stage in range(generate.pp_size)
        for tensor in range(generate.tp_size)
    ]
    alone = RankGrid(generate.pp_size, generate.tp_size, 1)
    whole = create_layout(held.model, alone.assign_ranks())
    kept = _count_kept_bytes(held, [whole.shards[alone.get_rank(part)] for part in parts])
    per_replica = len(parts)
    away = np.abs(
        np.arange(len(ranks))[:, None] // per_replica - np.arange(generate.num_replicas)[None, :]
    )
    # One byte more kept outweighs any distance; whole numbers keep ties exact.
    scale = np.gcd.reduce(kept, axis=None) or 1
    value = (kept // scale)[:, None, :] * float(away.max() * len(ranks) + 1) - away[:, :, None]
    # Imported here: it takes longer than all other imports of the package.
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(value.reshape(len(ranks), -1), maximize=True)
    seats = []
    served: Counter[int] = Counter()
    for column in columns.tolist():
        part = column % per_replica
        seats.append(replace(parts[part], dp_rank=served[part]))
        served[part] += 1
    return RankAssignment(generate.pp_size, generate.tp_size, generate.num_replicas, tuple(seats))


def _count_kept_bytes(held: ModelLayout, parts: Sequence[Mapping[str, TensorShard]]) -> np.ndarray:
    """Bytes of every part (columns) that every rank (rows) has already; equal ranks once."""
    specs = held.model.specs_by_name()
    rows: dict[int, list[int]] = {}
    for rank in held.ranks:
        shards = held.shards[rank]
        if id(shards) not in rows:
            rows[id(shards)] = [
                sum(
                    common.numel * specs[name].itemsize
                    for name in shards.keys() & part.keys()
                    for mine in shards[name].boxes
                    for wanted in part[name].boxes
                    if (common := mine.intersect(wanted))
                )
                for part in parts
            ]
    return np.array([rows[id(held.shards[rank])] for rank in held.ranks])


def assign_generation_ranks(
    grouping: str, train: RankGrid, generate: GenerationSizes, held: ModelLayout
) -> RankAssignment:
    """The seating of a grouping by its name in GROUPINGS. Raises ValueError."""
    if grouping == "zero":
        return assign_zero_redundancy(train, generate)
    if grouping == "vanilla":
        return assign_vanilla(train, generate)
    if grouping == "overlap":
        validate_sizes(train, generate)
        return assign_max_overlap(held, generate)
    raise ValueError(f"grouping {grouping}: must be one of {', '.join(GROUPINGS)}")


def list_micro_dp_groups(train: RankGrid, serving: RankAssignment) -> list[list[int]]:
    """The ranks of each training replica that serve the same part: the micro-DP groups."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in serving.ranks:
        at = serving.get_coordinates(rank)
        key = (train.get_coordinates(rank).dp_rank, at.pp_rank, at.tp_rank)
        found.setdefault(key, []).append(rank)
    return sorted(found.values())
