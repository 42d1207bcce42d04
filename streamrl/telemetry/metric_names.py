"""Metrics contract: every name that a run logs, with unit and meaning, as in metrics.tsv.

Names are stable. `<stage>` and other placeholders stand for one path segment. A metric without a
measurement in a step is NaN, never left out.
"""

import csv
import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from importlib import resources
from numbers import Integral, Real
from typing import Any

MAX_BINS = 512
STALENESS_HISTOGRAM = "staleness/histogram"
IDLE_PREFIX, DEPTH_PREFIX = "idle/", "queue/depth/"
WAIT_METRICS = EVALUATE_TIME, CHECKPOINT_TIME = "time/evaluate_s", "time/checkpoint_s"
"""Seconds of a step in which training waited; without a value in other steps."""


@dataclass(frozen=True)
class Histogram:
    """Counts per bin as a metric value; bin i is [edges[i], edges[i + 1]).

    Raises ValueError unless there are 1 to MAX_BINS bins, and one more edge than counts.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.counts) <= MAX_BINS or len(self.edges) != len(self.counts) + 1:
            sizes = f"{len(self.edges)} edges for {len(self.counts)} counts"
            raise ValueError(f"histogram: {sizes}, wanted one more and 1 to {MAX_BINS} bins")

    @classmethod
    def from_integer_counts(cls, counts: Mapping[int, int], *, maximum: int = 0) -> "Histogram":
        """Build a histogram with a bin of width 1 for each integer from 0 to the largest key.

        counts: counts (tokens) by non-negative integer (staleness). Larger keys than MAX_BINS - 1
            count in the last bin.
        maximum: continue with empty bins up to this integer.
        """
        if min(counts, default=0) < 0:
            raise ValueError(f"histogram: {min(counts)} is negative")
        last = min(max(maximum, *counts, 0), MAX_BINS - 1)
        bins = [0] * (last + 1)
        for value, count in counts.items():
            bins[min(value, last)] += count
        return cls(tuple(range(last + 2)), tuple(bins))

    def to_json(self) -> dict[str, list[float]]:
        return {"edges": list(self.edges), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Histogram":
        return cls(tuple(value["edges"]), tuple(value["counts"]))


MetricsRow = Mapping[str, float | Histogram]
NON_METRIC_KEYS = ("step", "time")
"""Keys of a line of metrics.jsonl that are not metrics."""


@dataclass(frozen=True)
class MetricSpec:
    """A metric that runs log.

    name: may hold a `<placeholder>` for one path segment.
    unit: empty for plain numbers.
    has_episodes: only runs with an environment log the metric.
    """

    name: str
    unit: str
    meaning: str
    has_episodes: bool = False

    @property
    def is_pattern(self) -> bool:
        return "<" in self.name

    def matches_name(self, name: str) -> bool:
        """Return whether a logged name is this metric; a placeholder stands for any segment."""
        return re.fullmatch(re.sub("<[a-z]+>", "[^/]+", self.name), name) is not None


def _read_contract() -> tuple[MetricSpec, ...]:
    text = (resources.files("streamrl.telemetry") / "metrics.tsv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t")
    return tuple(
        MetricSpec(row["name"], row["unit"], row["meaning"], row["runs"] == "episodes")
        for row in rows
    )


METRICS = _read_contract()
_METRICS_BY_NAME = {metric.name: metric for metric in METRICS if not metric.is_pattern}
_METRIC_PATTERNS = tuple(metric for metric in METRICS if metric.is_pattern)


def find_metric(name: str) -> MetricSpec:
    """Return the metric's spec for a logged name.

    Raises ValueError for a name that no spec matches.
    """
    if name in _METRICS_BY_NAME:
        return _METRICS_BY_NAME[name]
    for metric in _METRIC_PATTERNS:
        if metric.matches_name(name):
            return metric
    raise ValueError(f"metric {name} is not in the metrics contract")


def validate_row(row: MetricsRow) -> None:
    """Raise ValueError if a metrics row has an unknown name or a value of the wrong type.

    Values are numbers (including numpy scalars, excluding bool), or a Histogram where the metric's
    spec requires it.
    """
    for name, value in row.items():
        expected_type = Histogram if find_metric(name).name == STALENESS_HISTOGRAM else Real
        if not isinstance(value, expected_type) or isinstance(value, bool):
            raise ValueError(f"metric {name}={value!r}: must be a {expected_type.__name__}")


def to_json_value(value: float | Histogram) -> int | float | dict[str, list[float]] | None:
    """Convert a metric value to JSON; NaN and infinities become null."""
    if isinstance(value, Histogram):
        return value.to_json()
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def parse_metrics_row(line: Mapping[str, Any]) -> MetricsRow:
    """Convert a line of metrics.jsonl back to a metrics row, without null values.

    Raises ValueError for a value that is neither a number nor a histogram.
    """
    row: dict[str, float | Histogram] = {}
    for name, value in line.items():
        if name in NON_METRIC_KEYS or value is None:
            continue
        try:
            row[name] = value if isinstance(value, int | float) else Histogram.from_json(value)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{name}={value!r:.40}: neither a number nor a histogram") from None
    return row


def select_prefixed(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values whose names start with a prefix and that are not None, by the rest."""
    return {
        name.removeprefix(prefix): value
        for name, value in row.items()
        if name.startswith(prefix) and value is not None
    }


def choose_objective(row: Container[str]) -> tuple[str, str]:
    """Return label and metric of what a run is to improve, given the names in one of its rows.

    The loss if it trains on rows of the data, which have a place in the queue; else the reward.
    """
    return ("loss", "loss/policy") if f"{DEPTH_PREFIX}rows" in row else ("reward", "reward/mean")
