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
MAX_UNSCORED = 0.05
"""Share of the evaluated rollouts without a score above which an alert is raised."""
QUIET_STEPS = 20
"""Steps without its condition after which an alert may be raised again."""


@dataclass
class AlertWatch:
    """Watch over the rows of a run."""

    _dropped: float | None = None
    _last_steps: dict[str, int] = field(default_factory=dict)

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

    def _find_unscored(self, row: Mapping[str, float]) -> str:
        unscored, scored = row.get("eval/unscored", 0.0), row.get("eval/scored", 0.0)
        if not unscored > MAX_UNSCORED * (scored + unscored):
            return ""
        return (
            f"{unscored:.0f} of {scored + unscored:.0f} evaluated rollouts have no score, and are"
            " in no mean of the evaluation; the event `unscored` has the first reason"
        )

    def _find_drops(self, row: Mapping[str, float]) -> str:
        dropped = row.get("ledger/dropped", math.nan) - (self._dropped or 0.0)
        text = f"{dropped:.0f} groups were dropped in a step; drops/ has the causes"
        return text if dropped > 0 else ""


_CONDITIONS: Mapping[str, Callable[[AlertWatch, Mapping[str, float]], str]] = {
    "ess": AlertWatch._find_low_ess,
    "filter": AlertWatch._find_costly_filter,
    "drops": AlertWatch._find_drops,
    "unscored": AlertWatch._find_unscored,
}
