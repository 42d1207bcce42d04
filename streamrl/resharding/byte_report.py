"""Bytes that a resharding plan moves and holds: per rank, by link, and at the peak."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: Kinds of links between two ranks: the same rank's memory, within a node, or the network.
LINK_KINDS = ("local", "node", "network")


@dataclass(frozen=True)
class NodeTopology:
    """Division of ranks into nodes: `ranks_per_node` consecutive ranks share a node."""

    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"{self.ranks_per_node} ranks per node: must be at least 1")

    def get_node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def get_link(self, rank: int, other_rank: int) -> str:
        """Return the kind of link between two ranks, one of LINK_KINDS."""
        if rank == other_rank:
            return "local"
        return "node" if self.get_node(rank) == self.get_node(other_rank) else "network"


@dataclass
class RankBytes:
    """Bytes that a resharding plan moves to and from a rank, and that the rank holds.

    received_by_link, sent_by_link: by kind of link; `local` counts data that stays in place, in
    both. peak_bytes: model bytes held at once, each element once, if everything moves in a single
    round (as in the paper, arXiv:2409.19256). redundant_bytes: training weights that do not lie
    inside the generation weights and are kept beside them. memory_bytes: both layouts, sharing
    memory for tensors that are nested; an executor's buffers are extra.
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
    """Bytes of a resharding plan for every rank, and of the whole model."""

    model_bytes: int
    rank_bytes: Mapping[int, RankBytes]


def count_transfers(
    ranks: Mapping[int, RankBytes],
    cluster: NodeTopology,
    amounts: Mapping[int, int],
    receivers: Collection[int],
) -> None:
    """Add to `ranks`, by kind of link, the bytes that every source rank sends to every receiver.

    amounts: bytes that each source sends to each receiver. What a source that is a receiver too
    keeps counts as local. Takes O(sources + receivers) steps, not their product.
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
    """Add `num_bytes` times a count to each kind of link; counts are in the order of LINK_KINDS."""
    for link, count in zip(LINK_KINDS, counts_by_link, strict=True):
        bytes_by_link[link] += num_bytes * count
