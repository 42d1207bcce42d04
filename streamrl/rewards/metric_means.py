"""Means that are collected as sums, which can be added across processes before they are divided."""

from collections import Counter
from collections.abc import Mapping, Sequence

from streamrl.stream.evaluation.metrics import to_metric_segment
from streamrl.user_code.reward_result import RewardResult

MAX_EXTRA_METRICS = 200
"""Limit of distinct extra metrics logged per scorer."""
_SUM_SUFFIX, _COUNT_SUFFIX = ":sum", ":count"


class MetricSums:
    """Sums and counts of numbers, by metric name; `sums_to_means` divides them."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def __contains__(self, metric: str) -> bool:
        return metric + _COUNT_SUFFIX in self._sums

    def __len__(self) -> int:
        return len(self._sums) // 2

    def add(self, metric: str, number: float, *, weight: float = 1.0) -> None:
        """Add a number; `weight` is what it adds to the divisor of the mean."""
        self._sums[metric + _SUM_SUFFIX] += number  # type: ignore[assignment]
        self._sums[metric + _COUNT_SUFFIX] += weight  # type: ignore[assignment]

    def drain_sums(self) -> dict[str, float]:
        """Return the sums and counts since the last call, by name with suffix, and reset them."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)


def add_extra_metrics(sums: MetricSums, component: str, results: Sequence[RewardResult]) -> None:
    """Add a reward component's extra metrics; new names beyond MAX_EXTRA_METRICS are ignored."""
    for result in results:
        for name, number in result.extra_metrics:
            metric = f"{component}/{to_metric_segment(name)}"
            if metric in sums or len(sums) < MAX_EXTRA_METRICS:
                sums.add(metric, number)


def sums_to_means(counts: Mapping[str, float]) -> dict[str, float]:
    """Replace sums and counts from `drain_sums` by their mean; keep other entries of `counts`."""
    means = {}
    for name, value in counts.items():
        if name.endswith(_SUM_SUFFIX):
            metric = name.removesuffix(_SUM_SUFFIX)
            means[metric] = value / counts[metric + _COUNT_SUFFIX]
        elif not name.endswith(_COUNT_SUFFIX):
            means[name] = value
    return means
