"""Table 2 of HybridFlow (arXiv:2409.19256), and the same fractions of a resharding plan."""

from dataclasses import dataclass
from fractions import Fraction

from streamrl.resharding.plans import BytesReport


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


def received_fraction(report: BytesReport, rank: int) -> Fraction:
    """Return the bytes that a rank receives, as a fraction of the model's bytes."""
    return Fraction(report.rank_bytes[rank].received_bytes, report.model_bytes)


def peak_fraction(report: BytesReport, rank: int) -> Fraction:
    """Return the bytes that a rank holds at its peak, as a fraction of the model's bytes."""
    return Fraction(report.rank_bytes[rank].peak_bytes, report.model_bytes)


def redundant_fraction(report: BytesReport, rank: int) -> Fraction:
    """Return a rank's training weights kept beside its generation weights, as a fraction."""
    return Fraction(report.rank_bytes[rank].redundant_bytes, report.model_bytes)


def count_link_bytes(report: BytesReport, link: str) -> int:
    """Return the bytes that all ranks together receive over a kind of link."""
    return sum(rank.received_by_link[link] for rank in report.rank_bytes.values())
