"""Alerts from metrics rows: what someone who does not watch a run should hear of.

Stalls, deaths and failures are events of their own; an alert is an event that a row gives rise to.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from streamrl.telemetry.metric_names import Histogram, MetricsRow

ALERT_EVENT = "alert"
MIN_ESS = 0.3
"""Effective sample size, as a fraction of the trained tokens, below which an alert is raised."""
COSTLY_FILTER = 0.9
"""Share of filtered groups from which ten groups and more are sampled for each trained one."""
BIASED_STALE_SHARE, BIASED_LENGTH_RATIO = 0.05, 1.5
"""Share of stale groups, and their relative length, from which the trained lengths are biased."""
EQUAL_STEPS = 3
"""Steps in a row without a score difference in any group after which an alert is raised."""
MAX_UNSCORED = 0.05
"""Share of the evaluated rollouts without a score above which an alert is raised."""
QUIET_STEPS = 20
"""Steps without its condition after which an alert may be raised again."""


@dataclass
class AlertWatch:
    """Watch over the rows of a run.

    compares_rollouts: whether the algorithm learns from differences within a group alone.
    """

    compares_rollouts: bool = False
    _dropped: float | None = None
    _last_steps: dict[str, int] = field(default_factory=dict)
    _num_equal_steps: int = 0

    def find_alerts(self, step: int, row: MetricsRow) -> list[str]:
        """Return a sentence for each condition that holds and was quiet before."""
        numbers = {n: float(v) for n, v in row.items() if not isinstance(v, Histogram)}
        if self._dropped is None:  # a resumed run's count begins with its earlier drops
            self._dropped = 0.0 if step <= 1 else numbers.get("ledger/dropped", 0.0)
        alerts = []
        for name, find in _CONDITIONS.items():
            if text := find(self, numbers):
                if step - self._last_steps.get(name, -math.inf) > QUIET_STEPS:
                    alerts.append(text)
                self._last_steps[name] = step
        self._dropped = numbers.get("ledger/dropped", self._dropped)
        return alerts

    def _find_low_ess(self, row: Mapping[str, float]) -> str:
        ess = row.get("policy/ess", math.nan)
        if not ess < MIN_ESS:
            return ""
        return (
            f"policy/ess is {ess:.2f}, below {MIN_ESS:g}: few tokens carry the update; the"
            " rollouts are too far from the policy that is trained"
        )

    def _find_costly_filter(self, row: Mapping[str, float]) -> str:
        share = row.get("filter/share", math.nan)
        if not share >= COSTLY_FILTER:
            return ""
        return f"the filter takes {share:.1%} of the groups: the prompts are too easy or too hard"

    def _find_stale_bias(self, row: Mapping[str, float]) -> str:
        share, ratio = row.get("stale/share", 0.0), row.get("stale/length_ratio", math.nan)
        lost = row.get("stale/lost_prompts", 0.0)
        if not lost and not (share >= BIASED_STALE_SHARE and ratio >= BIASED_LENGTH_RATIO):
            return ""
        return (
            f"{share:.0%} of the groups were dropped as stale, with rollouts {ratio:.2g} times as"
            f" long as the trained ones, and {lost:.0f} prompts for good: training sees less of"
            " what is slow; pipeline.on_stale=wait takes nothing out"
        )

    def _find_unscored(self, row: Mapping[str, float]) -> str:
        if not lacks_scores(row):
            return ""
        return (
            f"{row['eval/unscored']:.0f} of {row['eval/scored'] + row['eval/unscored']:.0f}"
            " evaluated rollouts have no score, and are in no mean of the evaluation; the event"
            " `unscored` has the first reason"
        )

    def _find_drops(self, row: Mapping[str, float]) -> str:
        dropped = row.get("ledger/dropped", math.nan) - (self._dropped or 0.0)
        text = f"{dropped:.0f} groups were dropped in a step; drops/ has the causes"
        return text if dropped > 0 else ""

    def _find_equal_scores(self, row: Mapping[str, float]) -> str:
        is_flat = round(row.get("reward/std", math.nan), 6) == 0
        compares_equals = self.compares_rollouts and row.get("rollout/equal_score_frac") == 1
        self._num_equal_steps = self._num_equal_steps + 1 if is_flat or compares_equals else 0
        if self._num_equal_steps < EQUAL_STEPS:
            return ""
        finding = "the rollouts of each prompt score the same, and the algorithm compares them"
        if is_flat:
            finding = f"every rollout scores {row['reward/mean']:g}"
        return (
            f"nothing to learn for {self._num_equal_steps} steps: {finding}. Helps: a task neither"
            " too hard nor too easy, a better base model (docs/own_model.md), partial credit, a"
            " larger algorithm.group_size"
        )


def lacks_scores(row: Mapping[str, float]) -> bool:
    """Return whether a share of an evaluation's rollouts above MAX_UNSCORED has no score."""
    unscored, scored = row.get("eval/unscored", 0.0), row.get("eval/scored", 0.0)
    return unscored > MAX_UNSCORED * (scored + unscored)


_CONDITIONS: Mapping[str, Callable[[AlertWatch, Mapping[str, float]], str]] = {
    "ess": AlertWatch._find_low_ess,
    "filter": AlertWatch._find_costly_filter,
    "stale": AlertWatch._find_stale_bias,
    "drops": AlertWatch._find_drops,
    "equal_scores": AlertWatch._find_equal_scores,
    "unscored": AlertWatch._find_unscored,
}
