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

from streamrl.resharding.grids import Coordinates, Grid, Seating
from streamrl.resharding.layouts import Layout, Shard, seated_layout

GROUPINGS = ("zero", "vanilla", "overlap")


@dataclass(frozen=True)
class GenerationSizes:
    """Pg-Tg-Dg-D: stages, tensor ranks, micro-DP replicas, and training replicas."""

    stages: int
    tensor: int
    micro: int
    replicas: int

    def __post_init__(self) -> None:
        if min(self.stages, self.tensor, self.micro, self.replicas) < 1:
            raise ValueError(f"generation {self}: must be at least 1 in each")

    @classmethod
    def parse(cls, text: str) -> "GenerationSizes":
        """The sizes of "Pg-Tg-Dg-D". Raises ValueError."""
        parts = text.split("-")
        if len(parts) != len("PTGD") or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{text}: must be pipeline-tensor-microdata-data, as in 1-2-2-2")
        return cls(*map(int, parts))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stages * self.tensor * self.micro * self.replicas

    @property
    def all_replicas(self) -> int:
        """Replicas of the model in generation."""
        return self.micro * self.replicas

    def __str__(self) -> str:
        return f"{self.stages}-{self.tensor}-{self.micro}-{self.replicas}"


@dataclass(frozen=True)
class _Ratio:
    """How many training tensor ranks (a) and stages (c) make one of generation."""

    tensor: int
    stages: int

    @classmethod
    def of(cls, train: Grid, generate: GenerationSizes, grouping: str) -> "_Ratio":
        check_sizes(train, generate)
        divide = not (train.tensor % generate.tensor or train.stages % generate.stages)
        if not divide or train.replicas != generate.replicas:
            raise ValueError(
                f"grouping {grouping}: {generate} must divide {train} in stages and tensor ranks"
                " and have as many data replicas; grouping overlap takes any sizes"
            )
        return cls(train.tensor // generate.tensor, train.stages // generate.stages)


def check_sizes(train: Grid, generate: GenerationSizes) -> None:
    """Raises ValueError unless both use the same number of ranks."""
    if train.size != generate.size:
        raise ValueError(
            f"training {train} has {train.size} ranks, generation {generate} has {generate.size}"
        )


def vanilla(train: Grid, generate: GenerationSizes) -> Seating:
    """Consecutive ranks of a replica serve consecutive tensor shards, then stages."""
    _Ratio.of(train, generate, "vanilla")

    def seat(at: Coordinates) -> Coordinates:
        within = at.stage * train.tensor + at.tensor
        stage, tensor = divmod(within, generate.tensor)
        micro, stage = divmod(stage, generate.stages)
        return Coordinates(stage, tensor, at.replica * generate.micro + micro)

    return _seated(train, generate, seat)


def zero_redundancy(train: Grid, generate: GenerationSizes) -> Seating:
    """Tensor ranks at intervals of T/Tg, stages at intervals of P/Pg."""
    ratio = _Ratio.of(train, generate, "zero")

    def seat(at: Coordinates) -> Coordinates:
        micro = at.stage % ratio.stages * ratio.tensor + at.tensor % ratio.tensor
        return Coordinates(
            at.stage // ratio.stages,
            at.tensor // ratio.tensor,
            at.replica * generate.micro + micro,
        )

    return _seated(train, generate, seat)


def _seated(
    train: Grid, generate: GenerationSizes, seat: Callable[[Coordinates], Coordinates]
) -> Seating:
    seats = tuple(seat(train.coordinates(rank)) for rank in range(train.size))
    return Seating(generate.stages, generate.tensor, generate.all_replicas, seats)


def max_overlap(held: Layout, generate: GenerationSizes) -> Seating:
    """The seating whose ranks together keep the most bytes of what they hold in training.

    held: the training layout, of ranks 0, 1, ... Of several such seatings one is taken where the
    ranks of a replica are near each other. Raises ValueError if the sizes do not fit.
    """
    ranks = held.ranks
    if ranks != list(range(generate.size)):
        raise ValueError(f"generation {generate} has {generate.size} ranks, not {len(ranks)}")
    parts = [
        Coordinates(stage, tensor, 0)
        for stage in range(generate.stages)
        for tensor in range(generate.tensor)
    ]
    alone = Grid(generate.stages, generate.tensor, 1)
    whole = seated_layout(held.model, alone.seating())
    kept = _kept_bytes(held, [whole.shards[alone.rank(part)] for part in parts])
    per_replica = len(parts)
    away = np.abs(
        np.arange(len(ranks))[:, None] // per_replica - np.arange(generate.all_replicas)[None, :]
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
        seats.append(replace(parts[part], replica=served[part]))
        served[part] += 1
    return Seating(generate.stages, generate.tensor, generate.all_replicas, tuple(seats))


def _kept_bytes(held: Layout, parts: Sequence[Mapping[str, Shard]]) -> np.ndarray:
    """Bytes of every part (columns) that every rank (rows) has already; equal ranks once."""
    specs = held.model.by_name()
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
                    if (common := mine.meet(wanted))
                )
                for part in parts
            ]
    return np.array([rows[id(held.shards[rank])] for rank in held.ranks])


def seat(grouping: str, train: Grid, generate: GenerationSizes, held: Layout) -> Seating:
    """The seating of a grouping by its name in GROUPINGS. Raises ValueError."""
    if grouping == "zero":
        return zero_redundancy(train, generate)
    if grouping == "vanilla":
        return vanilla(train, generate)
    if grouping == "overlap":
        check_sizes(train, generate)
        return max_overlap(held, generate)
    raise ValueError(f"grouping {grouping}: must be one of {', '.join(GROUPINGS)}")


def micro_groups(train: Grid, serving: Seating) -> list[list[int]]:
    """The ranks of each training replica that serve the same part: the micro-DP groups."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in serving.ranks:
        at = serving.of(rank)
        key = (train.coordinates(rank).replica, at.stage, at.tensor)
        found.setdefault(key, []).append(rank)
    return sorted(found.values())
