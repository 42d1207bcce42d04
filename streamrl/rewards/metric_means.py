"""Means of the extra metrics that rewards return with their scores."""

from collections import Counter
from collections.abc import Mapping, Sequence

from streamrl.evaluation.metrics import to_metric_segment
from streamrl.rewards.interface.reward_result import RewardResult

MAX_EXTRA_METRICS = 200
"""Limit of distinct extra metrics logged per scorer."""
_SUM_SUFFIX, _COUNT_SUFFIX = ":sum", ":count"


class ExtraMetricSums:
    """Sums and counts of the extra metrics that rewards return, by metric name.

    Unlike means, sums can be added across scorers.
    """

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add_results(self, component: str, results: Sequence[RewardResult]) -> None:
        """Add a component's extra metrics; new names beyond MAX_EXTRA_METRICS are ignored."""
        for result in results:
            for name, number in result.extra_metrics:
                metric = f"{component}/{to_metric_segment(name)}"
                if metric + _COUNT_SUFFIX in self._sums or len(self._sums) < 2 * MAX_EXTRA_METRICS:
                    self._sums[metric + _SUM_SUFFIX] += number  # type: ignore[assignment]
                    self._sums[metric + _COUNT_SUFFIX] += 1

    def drain_sums(self) -> dict[str, float]:
        """Return the sums and counts since the last call, by name with suffix, and reset them."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)


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
