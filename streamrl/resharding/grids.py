"""Grids of ranks by pipeline stage, tensor-parallel rank and data-parallel replica.

Two orders are in use (arXiv:2409.19256 numbers ranks as "hf", Megatron-Core as "mcore"). With stage
p of P, tensor rank t of T and replica d of D:

    hf     rank = d*P*T + p*T + t      replicas outermost
    mcore  rank = p*D*T + d*T + t      stages outermost
"""

from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter

RANK_ORDERS = ("hf", "mcore")


@dataclass(frozen=True, order=True)
class RankCoordinates:
    """Coordinates of a rank: pipeline stage, tensor-parallel rank and data-parallel replica."""

    pp_rank: int
    tp_rank: int
    dp_rank: int


@dataclass(frozen=True)
class RankAssignment:
    """Coordinates of every rank in a grid of P stages, T tensor ranks and D data-parallel replicas.

    Rank i is at coordinates[i]; every position of the grid occurs exactly once.
    """

    pp_size: int
    tp_size: int
    dp_size: int
    coordinates: tuple[RankCoordinates, ...]

    @property
    def ranks(self) -> range:
        return range(len(self.coordinates))

    def get_coordinates(self, rank: int) -> RankCoordinates:
        return self.coordinates[rank]

    def list_tp_groups(self) -> list[list[int]]:
        """Return the ranks of each tensor-parallel group, in the order of their tensor ranks."""
        return self.group_ranks("dp_rank", "pp_rank")

    def list_dp_groups(self) -> list[list[int]]:
        """Return the groups of ranks that hold the same shards, in the order of their replicas."""
        return self.group_ranks("pp_rank", "tp_rank")

    def group_ranks(self, *names: str) -> list[list[int]]:
        """Return the ranks grouped by equal coordinates, such as "dp_rank"; each group is sorted.

        names: fields of RankCoordinates that must be equal.
        """
        key = attrgetter(*names)
        groups: dict[Hashable, list[int]] = {}
        for rank in sorted(self.ranks, key=self.get_coordinates):
            groups.setdefault(key(self.get_coordinates(rank)), []).append(rank)
        return sorted(groups.values())


@dataclass(frozen=True)
class RankGrid:
    """Grid of P stages x T tensor ranks x D data-parallel replicas, numbered in one of RANK_ORDERS.

    `str` and `from_text` write the sizes as P-T-D.
    """

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
        """Parse a grid's sizes, "P-T-D" such as "1-4-2". Raise ValueError if malformed."""
        parts = text.split("-")
        if len(parts) != len("PTD") or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{text}: must be pipeline-tensor-data, as in 1-4-2")
        stages, tensor, replicas = map(int, parts)
        return cls(stages, tensor, replicas, order)

    @property
    def num_ranks(self) -> int:
        return self.pp_size * self.tp_size * self.dp_size

    def get_coordinates(self, rank: int) -> RankCoordinates:
        outer, tensor = divmod(rank, self.tp_size)
        if self.order == "hf":
            replica, stage = divmod(outer, self.pp_size)
        else:
            stage, replica = divmod(outer, self.dp_size)
        return RankCoordinates(stage, tensor, replica)

    def assign_ranks(self) -> "RankAssignment":
        """Return the assignment that gives every rank its coordinates in this grid."""
        return RankAssignment(
            self.pp_size,
            self.tp_size,
            self.dp_size,
            tuple(self.get_coordinates(rank) for rank in range(self.num_ranks)),
        )

    def __str__(self) -> str:
        return f"{self.pp_size}-{self.tp_size}-{self.dp_size}"
