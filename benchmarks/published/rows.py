"""One published point beside what the planner says of it, and tables of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Value = float | str
WITHIN = 0.15
"""A predicted figure this close to the printed one, relatively, is a hit."""


@dataclass(frozen=True)
class Row:
    """A point of a source.

    source: hybridflow, real, flexrlhf, verl or nemo. where: table or figure. setting: of the run.
    quantity: what is given, with its unit. printed, predicted: a figure, or a decision as a word.
    fitted: whether constants were calibrated on it; it then counts in no rate.
    """

    source: str
    where: str
    setting: str
    quantity: str
    printed: Value
    predicted: Value
    fitted: bool = False

    @property
    def error(self) -> float:
        """Relative; NaN of a decision."""
        if isinstance(self.printed, str) or isinstance(self.predicted, str):
            return math.nan
        return self.predicted / self.printed - 1

    @property
    def hit(self) -> bool:
        """The decision is the same, or the figure is close."""
        if isinstance(self.printed, str) or isinstance(self.predicted, str):
            return self.printed == self.predicted
        return abs(self.error) <= WITHIN

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a relative error where there is one."""
        found = dict(vars(self)) | {"hit": self.hit}
        if not math.isnan(self.error):
            found["error"] = round(self.error, 4)
        return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """By source: decisions that are the same, and figures that are close, of those not fitted."""
    found: dict[str, Any] = {}
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source and not row.fitted]
        decisions = [row for row in own if math.isnan(row.error)]
        figures = [row for row in own if not math.isnan(row.error)]
        found[source] = {
            "decisions": len(decisions),
            "decisions_hit": sum(row.hit for row in decisions),
            "figures": len(figures),
            "figures_within_15_percent": sum(row.hit for row in figures),
            "mean_absolute_error": _mean(abs(row.error) for row in figures),
            "fitted": sum(row.fitted for row in rows if row.source == source),
        }
    return found


def _mean(values: Iterable[float]) -> float | None:
    every = [value for value in values if math.isfinite(value)]
    return round(sum(every) / len(every), 4) if every else None


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = [
        "| where | setting | quantity | printed | predicted | |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        cells = (
            row.where,
            row.setting,
            row.quantity,
            _shown(row.printed),
            _shown(row.predicted),
            _verdict(row),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(row: Row) -> str:
    told = "" if math.isnan(row.error) else f"{row.error:+.0%} "
    if row.fitted:
        return f"{told}fitted"
    return told + ("hit" if row.hit else "**miss**")


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "does not fit"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
