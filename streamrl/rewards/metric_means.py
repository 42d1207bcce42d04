"""Means of the numbers that rewards give besides their scores."""

from collections import Counter
from collections.abc import Mapping, Sequence

from streamrl.evaluation.metrics import to_metric_segment
from streamrl.rewards.interface.verdict import RewardResult

MAX_EXTRA_METRICS = 200
"""Numbers that are logged, of one scorer."""
_SUM_SUFFIX, _COUNT_SUFFIX = ":sum", ":count"


class ExtraMetricSums:
    """Sums and counts of further numbers, by metric: they add up over scorers."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add_results(self, component: str, found: Sequence[RewardResult]) -> None:
        """Add the numbers of a component's judgements; a new name only while there are few."""
        for one in found:
            for name, number in one.extra_metrics:
                metric = f"{component}/{to_metric_segment(name)}"
                if metric + _COUNT_SUFFIX in self._sums or len(self._sums) < 2 * MAX_EXTRA_METRICS:
                    self._sums[metric + _SUM_SUFFIX] += number  # type: ignore[assignment]
                    self._sums[metric + _COUNT_SUFFIX] += 1

    def drain_sums(self) -> dict[str, float]:
        """Give what was added since the last call."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)


def sums_to_means(counts: Mapping[str, float]) -> dict[str, float]:
    """Replace the sums and counts that `ExtraMetricSums` gives by means;

    others stay as they are.
    """
    found = {}
    for name, value in counts.items():
        if name.endswith(_SUM_SUFFIX):
            metric = name.removesuffix(_SUM_SUFFIX)
            found[metric] = value / counts[metric + _COUNT_SUFFIX]
        elif not name.endswith(_COUNT_SUFFIX):
            found[name] = value
    return found
