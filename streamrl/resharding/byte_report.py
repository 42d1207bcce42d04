"""What a plan moves and holds, in bytes: for every rank, over which link, and at its peak."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

#: What may lie between two ranks: one rank's own memory, a node's, or the network.
LINKS = ("local", "node", "network")


@dataclass(frozen=True)
class Nodes:
    """Consecutive ranks share a node, so many on each."""

    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"{self.ranks_per_node} ranks per node: must be at least 1")

    def node(self, rank: int) -> int:
        """The node a rank is on."""
        return rank // self.ranks_per_node

    def link(self, one: int, other: int) -> str:
        """Which of LINKS lies between two ranks."""
        if one == other:
            return "local"
        return "node" if self.node(one) == self.node(other) else "network"


@dataclass
class RankBytes:
    """One rank's share of a plan, in bytes.

    received, sent: by link; `local` is what stays where it is, in both. peak: of the model at once,
    each element once, where all of it moves in one piece: the paper's. redundant: what training
    keeps beside the generation weights because it does not lie inside them. memory: what both
    layouts take, tensor by tensor in one memory where the one's lies inside the other's; an
    executor's buffers come on top.
    """

    received: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    peak: int = 0
    redundant: int = 0
    memory: int = 0

    @property
    def received_bytes(self) -> int:
        """What comes from other ranks."""
        return self.received["node"] + self.received["network"]

    @property
    def sent_bytes(self) -> int:
        """What goes to other ranks, once for each of them."""
        return self.sent["node"] + self.sent["network"]


@dataclass(frozen=True)
class BytesReport:
    """The bytes of a plan: of the whole model (M) and of every rank."""

    model_bytes: int
    ranks: Mapping[int, RankBytes]

    def received(self, rank: int) -> Fraction:
        """What a rank receives, as a fraction of M."""
        return Fraction(self.ranks[rank].received_bytes, self.model_bytes)

    def peak(self, rank: int) -> Fraction:
        """What a rank holds of the model at once, as a fraction of M."""
        return Fraction(self.ranks[rank].peak, self.model_bytes)

    def redundant(self, rank: int) -> Fraction:
        """What a rank keeps twice, as a fraction of M."""
        return Fraction(self.ranks[rank].redundant, self.model_bytes)

    def link_bytes(self, link: str) -> int:
        """What all ranks together receive over a link."""
        return sum(rank.received[link] for rank in self.ranks.values())


def count(
    ranks: Mapping[int, RankBytes],
    cluster: Nodes,
    amounts: Mapping[int, int],
    takers: Collection[int],
) -> None:
    """Count that each of the takers gets so many bytes from each giver, itself perhaps among them.

    Takes a step for each giver and each taker, not for each two of them.
    """
    nodes = Counter(cluster.node(rank) for rank in takers)
    from_node: Counter[int] = Counter()
    for giver, amount in amounts.items():
        node = cluster.node(giver)
        from_node[node] += amount
        own = int(giver in takers)
        _add(ranks[giver].sent, amount, (own, nodes[node] - own, len(takers) - nodes[node]))
    everything = from_node.total()
    for taker in takers:
        own, near = amounts.get(taker, 0), from_node[cluster.node(taker)]
        _add(ranks[taker].received, 1, (own, near - own, everything - near))


def _add(counts: dict[str, int], num_bytes: int, times: tuple[int, int, int]) -> None:
    for link, often in zip(LINKS, times, strict=True):
        counts[link] += num_bytes * often


@dataclass(frozen=True)
class Expected:
    """One column of Table 2 of arXiv:2409.19256, per rank, as fractions of M."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


def table_2(
    stages: int, tensor: int, replicas: int, *, serving_stages: int, serving_tensor: int
) -> dict[str, Expected]:
    """What each scheme costs for a model that divides evenly.

    full_gather is DeepSpeed-Chat's, vanilla HybridFlow-V's; `redundant` of vanilla is that of a
    rank whose two shards have nothing in common.
    """
    model_ranks = stages * tensor
    world = model_ranks * replicas
    serving = serving_stages * serving_tensor
    return {
        "full_gather": Expected(Fraction(world - 1, world), Fraction(1), Fraction(1, world)),
        "vanilla": Expected(
            Fraction(model_ranks - 1, model_ranks), Fraction(1), Fraction(1, model_ranks)
        ),
        "zero": Expected(
            Fraction(model_ranks - serving, serving * model_ranks),
            Fraction(1, serving),
            Fraction(0),
        ),
    }
