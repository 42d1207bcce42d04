"""Bytes that a plan moves and holds: per rank, by link, and at its peak."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

#: Links between two ranks: the same rank's memory, the node, or the network.
LINK_KINDS = ("local", "node", "network")


@dataclass(frozen=True)
class NodeTopology:
    """Nodes of `ranks_per_node` consecutive ranks."""

    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"{self.ranks_per_node} ranks per node: must be at least 1")

    def get_node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def get_link(self, rank: int, other_rank: int) -> str:
        """Return the link between two ranks, one of LINK_KINDS."""
        if rank == other_rank:
            return "local"
        return "node" if self.get_node(rank) == self.get_node(other_rank) else "network"


@dataclass
class RankBytes:
    """A rank's share of a plan, in bytes.

    received_by_link, sent_by_link: `local` counts data that stays in place, in both. peak_bytes:
    model bytes held at once, each element once, if everything moves in one piece (as in the paper).
    redundant_bytes: training weights that do not lie inside the generation weights and are kept
    beside them. memory_bytes: both layouts, sharing memory for tensors that are nested; an
    executor's buffers are extra.
    """

    received_by_link: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINK_KINDS, 0))
    sent_by_link: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINK_KINDS, 0))
    peak_bytes: int = 0
    redundant_bytes: int = 0
    memory_bytes: int = 0

    @property
    def received_bytes(self) -> int:
        """Bytes received from other ranks."""
        return self.received_by_link["node"] + self.received_by_link["network"]

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks, counted per receiver."""
        return self.sent_by_link["node"] + self.sent_by_link["network"]


@dataclass(frozen=True)
class BytesReport:
    """Bytes of a plan: of the whole model (M) and of every rank."""

    model_bytes: int
    rank_bytes: Mapping[int, RankBytes]

    def received_fraction(self, rank: int) -> Fraction:
        """Return the bytes that a rank receives, as a fraction of M."""
        return Fraction(self.rank_bytes[rank].received_bytes, self.model_bytes)

    def peak_fraction(self, rank: int) -> Fraction:
        """Return a rank's peak bytes as a fraction of M."""
        return Fraction(self.rank_bytes[rank].peak_bytes, self.model_bytes)

    def redundant_fraction(self, rank: int) -> Fraction:
        """Return a rank's redundant bytes as a fraction of M."""
        return Fraction(self.rank_bytes[rank].redundant_bytes, self.model_bytes)

    def count_link_bytes(self, link: str) -> int:
        """Return the bytes that all ranks receive over a link."""
        return sum(rank.received_by_link[link] for rank in self.rank_bytes.values())


def count_transfers(
    ranks: Mapping[int, RankBytes],
    cluster: NodeTopology,
    amounts: Mapping[int, int],
    receivers: Collection[int],
) -> None:
    """Add a transfer from every source to every receiver; `amounts` maps sources to bytes.

    A source may be a receiver too. Takes O(sources + receivers) steps, not their product.
    """
    receivers_by_node = Counter(cluster.get_node(rank) for rank in receivers)
    bytes_by_node: Counter[int] = Counter()
    for source, amount in amounts.items():
        node = cluster.get_node(source)
        bytes_by_node[node] += amount
        num_local = int(source in receivers)
        num_near = receivers_by_node[node]
        _add_link_bytes(
            ranks[source].sent_by_link,
            amount,
            (num_local, num_near - num_local, len(receivers) - num_near),
        )
    total_bytes = bytes_by_node.total()
    for receiver in receivers:
        num_local, node_bytes = amounts.get(receiver, 0), bytes_by_node[cluster.get_node(receiver)]
        _add_link_bytes(
            ranks[receiver].received_by_link,
            1,
            (num_local, node_bytes - num_local, total_bytes - node_bytes),
        )


def _add_link_bytes(
    bytes_by_link: dict[str, int], num_bytes: int, counts_by_link: tuple[int, int, int]
) -> None:
    for link, count in zip(LINK_KINDS, counts_by_link, strict=True):
        bytes_by_link[link] += num_bytes * count


@dataclass(frozen=True)
class ExpectedFractions:
    """A column of Table 2 of arXiv:2409.19256, per rank, as fractions of M."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


def compute_table_2(
    stages: int, tensor: int, replicas: int, *, serving_stages: int, serving_tensor: int
) -> dict[str, ExpectedFractions]:
    """Return the cost of each scheme for a model that divides evenly (Table 2 of arXiv:2409.19256).

    full_gather is DeepSpeed-Chat's, vanilla HybridFlow-V's. `redundant` of vanilla applies to a
    rank whose training and generation shards are disjoint.
    """
    model_ranks = stages * tensor
    world = model_ranks * replicas
    serving = serving_stages * serving_tensor
    return {
        "full_gather": ExpectedFractions(
            Fraction(world - 1, world), Fraction(1), Fraction(1, world)
        ),
        "vanilla": ExpectedFractions(
            Fraction(model_ranks - 1, model_ranks), Fraction(1), Fraction(1, model_ranks)
        ),
        "zero": ExpectedFractions(
            Fraction(model_ranks - serving, serving * model_ranks),
            Fraction(1, serving),
            Fraction(0),
        ),
    }
