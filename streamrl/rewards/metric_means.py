"""Means of the numbers that rewards give besides their scores."""

from collections import Counter
from collections.abc import Mapping, Sequence

from streamrl.evaluation.metrics import segment
from streamrl.rewards.interface.verdict import Judgement

MOST_METRICS = 200
"""Numbers that are logged, of one scorer."""
_SUM, _COUNT = ":sum", ":count"


class NumberSums:
    """Sums and counts of further numbers, by metric: they add up over scorers."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, component: str, found: Sequence[Judgement]) -> None:
        """Add the numbers of a component's judgements; a new name only while there are few."""
        for one in found:
            for name, number in one.numbers:
                metric = f"{component}/{segment(name)}"
                if metric + _COUNT in self._sums or len(self._sums) < 2 * MOST_METRICS:
                    self._sums[metric + _SUM] += number  # type: ignore[assignment]
                    self._sums[metric + _COUNT] += 1

    def drain(self) -> dict[str, float]:
        """Give what was added since the last call."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)


def with_means(counts: Mapping[str, float]) -> dict[str, float]:
    """Replace the sums and counts that `NumberSums` gives by means; others stay as they are."""
    found = {}
    for name, value in counts.items():
        if name.endswith(_SUM):
            metric = name.removesuffix(_SUM)
            found[metric] = value / counts[metric + _COUNT]
        elif not name.endswith(_COUNT):
            found[name] = value
    return found
