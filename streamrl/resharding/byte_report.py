"""What a plan moves and holds, in bytes: for every rank, over which link, and at its peak."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

#: What may lie between two ranks: one rank's own memory, a node's, or the network.
LINK_KINDS = ("local", "node", "network")


@dataclass(frozen=True)
class NodeTopology:
    """Consecutive ranks share a node, so many on each."""

    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"{self.ranks_per_node} ranks per node: must be at least 1")

    def get_node(self, rank: int) -> int:
        """The node a rank is on."""
        return rank // self.ranks_per_node

    def get_link(self, one: int, other: int) -> str:
        """Which of LINKS lies between two ranks."""
        if one == other:
            return "local"
        return "node" if self.get_node(one) == self.get_node(other) else "network"


@dataclass
class RankBytes:
    """One rank's share of a plan, in bytes.

    received, sent: by link; `local` is what stays where it is, in both. peak: of the model at once,
    each element once, where all of it moves in one piece: the paper's. redundant: what training
    keeps beside the generation weights because it does not lie inside them. memory: what both
    layouts take, tensor by tensor in one memory where the one's lies inside the other's; an
    executor's buffers come on top.
    """

    received_by_link: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINK_KINDS, 0))
    sent_by_link: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINK_KINDS, 0))
    peak_bytes: int = 0
    redundant_bytes: int = 0
    memory_bytes: int = 0

    @property
    def received_bytes(self) -> int:
        """What comes from other ranks."""
        return self.received_by_link["node"] + self.received_by_link["network"]

    @property
    def sent_bytes(self) -> int:
        """What goes to other ranks, once for each of them."""
        return self.sent_by_link["node"] + self.sent_by_link["network"]


@dataclass(frozen=True)
class BytesReport:
    """The bytes of a plan: of the whole model (M) and of every rank."""

    model_bytes: int
    rank_bytes: Mapping[int, RankBytes]

    def received_fraction(self, rank: int) -> Fraction:
        """What a rank receives, as a fraction of M."""
        return Fraction(self.rank_bytes[rank].received_bytes, self.model_bytes)

    def peak_fraction(self, rank: int) -> Fraction:
        """What a rank holds of the model at once, as a fraction of M."""
        return Fraction(self.rank_bytes[rank].peak_bytes, self.model_bytes)

    def redundant_fraction(self, rank: int) -> Fraction:
        """What a rank keeps twice, as a fraction of M."""
        return Fraction(self.rank_bytes[rank].redundant_bytes, self.model_bytes)

    def count_link_bytes(self, link: str) -> int:
        """What all ranks together receive over a link."""
        return sum(rank.received_by_link[link] for rank in self.rank_bytes.values())


def count_transfers(
    ranks: Mapping[int, RankBytes],
    cluster: NodeTopology,
    amounts: Mapping[int, int],
    takers: Collection[int],
) -> None:
    """Count that each of the takers gets so many bytes from each giver, itself perhaps among them.

    Takes a step for each giver and each taker, not for each two of them.
    """
    nodes = Counter(cluster.get_node(rank) for rank in takers)
    from_node: Counter[int] = Counter()
    for giver, amount in amounts.items():
        node = cluster.get_node(giver)
        from_node[node] += amount
        own = int(giver in takers)
        _add_link_bytes(
            ranks[giver].sent_by_link, amount, (own, nodes[node] - own, len(takers) - nodes[node])
        )
    everything = from_node.total()
    for taker in takers:
        own, near = amounts.get(taker, 0), from_node[cluster.get_node(taker)]
        _add_link_bytes(ranks[taker].received_by_link, 1, (own, near - own, everything - near))


def _add_link_bytes(counts: dict[str, int], num_bytes: int, times: tuple[int, int, int]) -> None:
    for link, often in zip(LINK_KINDS, times, strict=True):
        counts[link] += num_bytes * often


@dataclass(frozen=True)
class ExpectedFractions:
    """One column of Table 2 of arXiv:2409.19256, per rank, as fractions of M."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


def compute_table_2(
    stages: int, tensor: int, replicas: int, *, serving_stages: int, serving_tensor: int
) -> dict[str, ExpectedFractions]:
    """What each scheme costs for a model that divides evenly.

    full_gather is DeepSpeed-Chat's, vanilla HybridFlow-V's; `redundant` of vanilla is that of a
    rank whose two shards have nothing in common.
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
