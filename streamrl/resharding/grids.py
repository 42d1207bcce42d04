"""Ranks on a grid of pipeline stages, tensor-parallel ranks and data-parallel replicas.

Two orders are in use (arXiv:2409.19256 numbers ranks as "hf", Megatron-Core as "mcore"). With
stage p of P, tensor rank t of T and replica d of D:

    hf     rank = d*P*T + p*T + t      replicas outermost
    mcore  rank = p*D*T + d*T + t      stages outermost
"""

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter

RANK_ORDERS = ("hf", "mcore")


@dataclass(frozen=True, order=True)
class RankCoordinates:
    """Where a rank sits: its pipeline stage, tensor rank and data-parallel replica."""

    pp_rank: int
    tp_rank: int
    dp_rank: int


@dataclass(frozen=True)
class RankAssignment:
    """Which rank sits where in P-T-D, in any order: ranks[i] sits at seats[i].

    Raises ValueError unless every seat is taken once.
    """

    pp_size: int
    tp_size: int
    dp_size: int
    coordinates: tuple[RankCoordinates, ...]
    first_rank: int = 0

    def __post_init__(self) -> None:
        every = {
            RankCoordinates(*at)
            for at in itertools.product(
                range(self.pp_size), range(self.tp_size), range(self.dp_size)
            )
        }
        if len(self.coordinates) != len(every) or set(self.coordinates) != every:
            raise ValueError(
                f"{len(self.coordinates)} seats do not fill"
                f" {self.pp_size}-{self.tp_size}-{self.dp_size}"
            )

    @property
    def ranks(self) -> range:
        """The ranks, in the order of their seats."""
        return range(self.first_rank, self.first_rank + len(self.coordinates))

    def get_coordinates(self, rank: int) -> RankCoordinates:
        """Where a rank sits."""
        return self.coordinates[rank - self.first_rank]

    def list_tp_groups(self) -> list[list[int]]:
        """Ranks that split the same places, by tensor rank."""
        return self.group_ranks("dp_rank", "pp_rank")

    def list_pp_groups(self) -> list[list[int]]:
        """Ranks that pass activations on, by stage."""
        return self.group_ranks("dp_rank", "tp_rank")

    def list_dp_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard, by replica."""
        return self.group_ranks("pp_rank", "tp_rank")

    def list_replica_groups(self) -> list[list[int]]:
        """Ranks that hold one replica of the model, stage by stage."""
        return self.group_ranks("dp_rank")

    def group_ranks(self, *same: str) -> list[list[int]]:
        """The ranks whose coordinates agree in these; in each group by coordinates."""
        key = attrgetter(*same)
        found: dict[Hashable, list[int]] = {}
        for rank in sorted(self.ranks, key=self.get_coordinates):
            found.setdefault(key(self.get_coordinates(rank)), []).append(rank)
        return sorted(found.values())


@dataclass(frozen=True)
class RankGrid:
    """P-T-D ranks in one of ORDERS; `str` and `parse` write it as P-T-D."""

    pp_size: int
    tp_size: int
    dp_size: int
    order: str = "hf"

    def __post_init__(self) -> None:
        if min(self.pp_size, self.tp_size, self.dp_size) < 1:
            raise ValueError(f"grid {self}: must be at least 1 in each")
        if self.order not in RANK_ORDERS:
            raise ValueError(f"order {self.order}: must be one of {', '.join(RANK_ORDERS)}")

    @classmethod
    def from_text(cls, text: str, order: str = "hf") -> "RankGrid":
        """The grid of "P-T-D". Raises ValueError."""
        parts = text.split("-")
        if len(parts) != len("PTD") or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{text}: must be pipeline-tensor-data, as in 1-4-2")
        stages, tensor, replicas = map(int, parts)
        return cls(stages, tensor, replicas, order)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.tp_size * self.dp_size

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.pp_size * self.tp_size

    def get_rank(self, at: RankCoordinates) -> int:
        """The rank at these coordinates."""
        if self.order == "hf":
            return (at.dp_rank * self.pp_size + at.pp_rank) * self.tp_size + at.tp_rank
        return (at.pp_rank * self.dp_size + at.dp_rank) * self.tp_size + at.tp_rank

    def get_coordinates(self, rank: int) -> RankCoordinates:
        """Where a rank sits."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} of a grid of {self.num_ranks}")
        outer, tensor = divmod(rank, self.tp_size)
        if self.order == "hf":
            replica, stage = divmod(outer, self.pp_size)
        else:
            stage, replica = divmod(outer, self.dp_size)
        return RankCoordinates(stage, tensor, replica)

    def assign_ranks(self) -> "RankAssignment":
        """Every rank at its own coordinates."""
        return RankAssignment(
            self.pp_size,
            self.tp_size,
            self.dp_size,
            tuple(self.get_coordinates(rank) for rank in range(self.num_ranks)),
        )

    def __str__(self) -> str:
        return f"{self.pp_size}-{self.tp_size}-{self.dp_size}"
