"""Alerts from metrics rows: what someone who does not watch a run should hear of.

Stalls, deaths and failures are events of their own; an alert is an event that a row gives rise to.
"""

import math
from collections import defaultdict
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


CONDITIONS: Mapping[str, tuple[Callable[[Mapping[str, float]], bool], str]] = {
    "ess": (
        lambda row: row["policy/ess"] < MIN_ESS,
        "policy/ess is {policy/ess:.2f}, below " + f"{MIN_ESS:g}" + ": few tokens carry the"
        " update; the rollouts are too far from the policy that is trained",
    ),
    "filter": (
        lambda row: row["filter/share"] >= COSTLY_FILTER,
        "the filter takes {filter/share:.1%} of the groups: the prompts are too easy or too hard",
    ),
    "stale": (
        lambda row: (
            row["stale/lost_prompts"] > 0
            or (
                row["stale/share"] >= BIASED_STALE_SHARE
                and row["stale/length_ratio"] >= BIASED_LENGTH_RATIO
            )
        ),
        "{stale/share:.0%} of the groups were dropped as stale, with rollouts"
        " {stale/length_ratio:.2g} times as long as the trained ones, and {stale/lost_prompts:.0f}"
        " prompts for good: training sees less of what is slow; pipeline.on_stale=wait takes"
        " nothing out",
    ),
    "drops": (
        lambda row: row["dropped"] > 0,
        "{dropped:.0f} groups were dropped in a step; drops/ has the causes",
    ),
    "equal_scores": (
        lambda row: row["equal_steps"] >= EQUAL_STEPS,
        "nothing to learn for {equal_steps:.0f} steps: {finding}. Helps: a task neither too hard"
        " nor too easy, a better base model (docs/own_model.md), partial credit, a larger"
        " algorithm.group_size",
    ),
    "unscored": (
        lambda row: lacks_scores(row),
        "{eval/unscored:.0f} of {rollouts:.0f} evaluated rollouts have no score, and are in no mean"
        " of the evaluation; the event `unscored` has the first reason",
    ),
}
"""Conditions of alerts with their texts, over a row whose missing values are NaN."""


@dataclass
class AlertWatch:
    """Watch over the rows of a run.

    compares_rollouts: whether the algorithm learns from differences of scores within a group alone.
    """

    compares_rollouts: bool = False
    _dropped: float | None = None
    _last_steps: dict[str, int] = field(default_factory=dict)
    _num_equal_steps: int = 0

    def find_alerts(self, step: int, row: MetricsRow) -> list[str]:
        """Return a sentence for each condition that holds and was quiet before."""
        numbers = {n: float(v) for n, v in row.items() if not isinstance(v, Histogram)}
        facts = defaultdict(lambda: math.nan, numbers)
        if self._dropped is None:  # a resumed run's count begins with its earlier drops
            self._dropped = 0.0 if step <= 1 else numbers.get("ledger/dropped", 0.0)
        facts["dropped"] = facts["ledger/dropped"] - self._dropped
        facts["rollouts"] = facts["eval/scored"] + facts["eval/unscored"]
        self._dropped = numbers.get("ledger/dropped", self._dropped)
        is_flat = round(facts["reward/std"], 6) == 0
        has_equals = self.compares_rollouts and facts["rollout/equal_score_frac"] == 1
        self._num_equal_steps = self._num_equal_steps + 1 if is_flat or has_equals else 0
        facts["equal_steps"] = self._num_equal_steps
        finding = "the rollouts of each prompt score the same, and the algorithm compares them"
        if is_flat:
            finding = f"every rollout scores {facts['reward/mean']:g}"
        alerts = []
        for name, (holds, text) in CONDITIONS.items():
            if holds(facts):
                if step - self._last_steps.get(name, -math.inf) > QUIET_STEPS:
                    alerts.append(text.format_map({**facts, "finding": finding}))
                self._last_steps[name] = step
        return alerts


def lacks_scores(row: Mapping[str, float]) -> bool:
    """Return whether a share of an evaluation's rollouts above MAX_UNSCORED has no score."""
    unscored, scored = row.get("eval/unscored", 0.0), row.get("eval/scored", 0.0)
    return unscored > MAX_UNSCORED * (scored + unscored)
