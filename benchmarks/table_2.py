"""Table 2 of HybridFlow (arXiv:2409.19256), and the same fractions of a resharding plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from streamrl.resharding.boxes import count_elements, is_nested, subtract_boxes
from streamrl.resharding.plans import (
    CopyPlan,
    GatherPlan,
    NodeTopology,
    RankBytes,
    count_transfers,
)


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
    if isinstance(plan, CopyPlan):
        rank_bytes = plan.report_bytes()
    else:
        rank_bytes = {rank: RankBytes() for rank in ranks}
        sent = plan.count_sent_bytes()
        for group in plan.groups:
            amounts = {rank: sent[rank] for rank in group}
            count_transfers(rank_bytes, cluster, amounts, set(group))
            # The gathered data includes all that a rank needs.
            peaks |= dict.fromkeys(group, sum(amounts.values()))
    for rank, (memory, _, _) in held.items():
        rank_bytes[rank].memory_bytes = memory
    redundant = {rank: num_bytes for rank, (_, _, num_bytes) in held.items()}
    return PlanReport(plan.target.model.num_bytes, rank_bytes, peaks, redundant)


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
