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

ORDERS = ("hf", "mcore")


@dataclass(frozen=True, order=True)
class Coordinates:
    """Where a rank sits: its pipeline stage, tensor rank and data-parallel replica."""

    stage: int
    tensor: int
    replica: int


@dataclass(frozen=True)
class Seating:
    """Which rank sits where in P-T-D, in any order: ranks[i] sits at seats[i].

    Raises ValueError unless every seat is taken once.
    """

    stages: int
    tensor: int
    replicas: int
    seats: tuple[Coordinates, ...]
    first_rank: int = 0

    def __post_init__(self) -> None:
        every = {
            Coordinates(*at)
            for at in itertools.product(
                range(self.stages), range(self.tensor), range(self.replicas)
            )
        }
        if len(self.seats) != len(every) or set(self.seats) != every:
            raise ValueError(
                f"{len(self.seats)} seats do not fill {self.stages}-{self.tensor}-{self.replicas}"
            )

    @property
    def ranks(self) -> range:
        """The ranks, in the order of their seats."""
        return range(self.first_rank, self.first_rank + len(self.seats))

    def of(self, rank: int) -> Coordinates:
        """Where a rank sits."""
        return self.seats[rank - self.first_rank]

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that split the same places, by tensor rank."""
        return self.groups("replica", "stage")

    def pipeline_groups(self) -> list[list[int]]:
        """Ranks that pass activations on, by stage."""
        return self.groups("replica", "tensor")

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard, by replica."""
        return self.groups("stage", "tensor")

    def replica_groups(self) -> list[list[int]]:
        """Ranks that hold one replica of the model, stage by stage."""
        return self.groups("replica")

    def groups(self, *same: str) -> list[list[int]]:
        """The ranks whose coordinates agree in these; in each group by coordinates."""
        key = attrgetter(*same)
        found: dict[Hashable, list[int]] = {}
        for rank in sorted(self.ranks, key=self.of):
            found.setdefault(key(self.of(rank)), []).append(rank)
        return sorted(found.values())


@dataclass(frozen=True)
class Grid:
    """P-T-D ranks in one of ORDERS; `str` and `parse` write it as P-T-D."""

    stages: int
    tensor: int
    replicas: int
    order: str = "hf"

    def __post_init__(self) -> None:
        if min(self.stages, self.tensor, self.replicas) < 1:
            raise ValueError(f"grid {self}: must be at least 1 in each")
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order}: must be one of {', '.join(ORDERS)}")

    @classmethod
    def parse(cls, text: str, order: str = "hf") -> "Grid":
        """The grid of "P-T-D". Raises ValueError."""
        parts = text.split("-")
        if len(parts) != len("PTD") or not all(part.isdecimal() for part in parts):
            raise ValueError(f"{text}: must be pipeline-tensor-data, as in 1-4-2")
        stages, tensor, replicas = map(int, parts)
        return cls(stages, tensor, replicas, order)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stages * self.tensor * self.replicas

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.stages * self.tensor

    def rank(self, at: Coordinates) -> int:
        """The rank at these coordinates."""
        if self.order == "hf":
            return (at.replica * self.stages + at.stage) * self.tensor + at.tensor
        return (at.stage * self.replicas + at.replica) * self.tensor + at.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank sits."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} of a grid of {self.size}")
        outer, tensor = divmod(rank, self.tensor)
        if self.order == "hf":
            replica, stage = divmod(outer, self.stages)
        else:
            stage, replica = divmod(outer, self.replicas)
        return Coordinates(stage, tensor, replica)

    def seating(self) -> "Seating":
        """Every rank at its own coordinates."""
        return Seating(
            self.stages,
            self.tensor,
            self.replicas,
            tuple(self.coordinates(rank) for rank in range(self.size)),
        )

    def __str__(self) -> str:
        return f"{self.stages}-{self.tensor}-{self.replicas}"
