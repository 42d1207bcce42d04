"""Table 2 of HybridFlow (arXiv:2409.19256), and the same fractions of a resharding plan."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from streamrl.resharding.boxes import TensorBox, count_elements, subtract_boxes
from streamrl.resharding.layouts import ModelLayout, partition_shards
from streamrl.resharding.plans import CopyPlan, GatherPlan, NodeTopology

#: Kinds of links between two ranks: the same rank's memory, within a node, or the network.
LINK_KINDS = ("local", "node", "network")


def is_nested(inner: Iterable[TensorBox], outer: Collection[TensorBox]) -> bool:
    """Return True if each inner box lies within a single outer box."""
    return all(any(box.intersect(other) == box for other in outer) for box in inner)


def partition_zero3(layout: ModelLayout, groups: Sequence[Sequence[int]]) -> ModelLayout:
    """Return the layout in which each rank of a group keeps a flat range of every shard (ZeRO-3).

    The ranks of a group must hold the same shards in `layout`.
    """
    return partition_shards(
        layout, groups, lambda shard, index, count: shard.chunk_flat(index, count)
    )


@dataclass
class RankBytes:
    """Bytes that a resharding plan moves to and from a rank, and that the rank holds.

    received_by_link, sent_by_link: by kind of link; `local` counts data that stays in place, in
    both. memory_bytes: both layouts, sharing memory for tensors that are nested; an executor's
    buffers are extra.
    """

    received_by_link: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINK_KINDS, 0))
    sent_by_link: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINK_KINDS, 0))
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
class ExpectedFractions:
    """Bytes per rank as fractions of the model's bytes: a column of Table 2 of arXiv:2409.19256."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


def compute_table_2(
    stages: int, tensor: int, replicas: int, *, serving_stages: int, serving_tensor: int
) -> dict[str, ExpectedFractions]:
    """Return the bytes per rank of each resharding scheme by Table 2 of arXiv:2409.19256.

    The model must divide evenly. stages, tensor, replicas: sizes of pipeline, tensor and data
    parallelism in training; serving_stages, serving_tensor: those of a generation replica.
    full_gather is DeepSpeed-Chat's scheme, vanilla HybridFlow-V's, zero HybridFlow's. `redundant`
    of vanilla applies to a rank whose training and generation shards are disjoint.
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


@dataclass(frozen=True)
class PlanReport:
    """Bytes of a resharding plan: of the whole model, and by rank.

    peak_bytes: model bytes that a rank holds at once, each element once, if everything moves in a
    single round. redundant_bytes: training weights that a rank keeps beside its generation weights.
    """

    model_bytes: int
    rank_bytes: Mapping[int, RankBytes]
    peak_bytes: Mapping[int, int]
    redundant_bytes: Mapping[int, int]


def report_plan(
    plan: CopyPlan | GatherPlan, cluster: NodeTopology, *, keeps_copy: bool = False
) -> PlanReport:
    """Count the bytes of a plan. keeps_copy: ranks keep their training shards as a copy."""
    ranks = sorted({*plan.source.ranks, *plan.target.ranks})
    held = {rank: _count_held(plan, rank, keeps_copy=keeps_copy) for rank in ranks}
    peaks = {rank: peak for rank, (_, peak, _) in held.items()}
    rank_bytes = {rank: RankBytes(memory_bytes=memory) for rank, (memory, _, _) in held.items()}
    for source, receiver, num_bytes in _list_transfers(plan):
        is_near = cluster.get_node(source) == cluster.get_node(receiver)
        link = "local" if source == receiver else "node" if is_near else "network"
        rank_bytes[source].sent_by_link[link] += num_bytes
        rank_bytes[receiver].received_by_link[link] += num_bytes
    if isinstance(plan, GatherPlan):
        sent = plan.count_sent_bytes()
        for group in plan.groups:
            # The gathered data includes all that a rank needs.
            peaks |= dict.fromkeys(group, sum(sent[rank] for rank in group))
    redundant = {rank: num_bytes for rank, (_, _, num_bytes) in held.items()}
    return PlanReport(plan.target.model.num_bytes, rank_bytes, peaks, redundant)


def _list_transfers(plan: CopyPlan | GatherPlan) -> Iterator[tuple[int, int, int]]:
    """Yield (source, receiver, bytes) of each transfer, and of data that stays on its rank."""
    if isinstance(plan, CopyPlan):
        sizes = {spec.name: spec.itemsize for spec in plan.target.model.tensors}
        for copy in plan.copies:
            tensor, box = copy.named_box
            yield copy.source, copy.destination, box.numel * sizes[tensor]
        return
    sent = plan.count_sent_bytes()
    for group in plan.groups:
        for source in group:
            for receiver in group:
                yield source, receiver, sent[source]


def _count_held(
    plan: CopyPlan | GatherPlan, rank: int, *, keeps_copy: bool
) -> tuple[int, int, int]:
    """Return the bytes of a rank's memory, its peak and its redundant training weights."""
    memory = peak = redundant = 0
    for spec in plan.target.model.tensors:
        source, target = (
            layout.get_boxes(rank, spec.name) for layout in (plan.source, plan.target)
        )
        held, served = count_elements(source), count_elements(target)
        beside = count_elements(subtract_boxes(source, target))
        is_shared = not keeps_copy and (is_nested(source, target) or is_nested(target, source))
        memory += (max(held, served) if is_shared else held + served) * spec.itemsize
        peak += (beside + served) * spec.itemsize
        redundant += (held if keeps_copy else beside) * spec.itemsize
    return memory, peak, redundant


def received_fraction(report: PlanReport, rank: int) -> Fraction:
    """Return the bytes that a rank receives, as a fraction of the model's bytes."""
    return Fraction(report.rank_bytes[rank].received_bytes, report.model_bytes)


def peak_fraction(report: PlanReport, rank: int) -> Fraction:
    """Return the bytes that a rank holds at its peak, as a fraction of the model's bytes."""
    return Fraction(report.peak_bytes[rank], report.model_bytes)


def redundant_fraction(report: PlanReport, rank: int) -> Fraction:
    """Return a rank's training weights kept beside its generation weights, as a fraction."""
    return Fraction(report.redundant_bytes[rank], report.model_bytes)


def count_link_bytes(report: PlanReport, link: str) -> int:
    """Return the bytes that all ranks together receive over a kind of link."""
    return sum(rank.received_by_link[link] for rank in report.rank_bytes.values())
