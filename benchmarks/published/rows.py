"""Published points beside the planner's predictions, and tables of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Value = float | str
HIT_TOLERANCE = 0.15
"""Largest relative error of a hit."""


@dataclass(frozen=True)
class Row:
    """A published point and its prediction.

    source: hybridflow, real, flexrlhf, verl or nemo. where: table or figure. setting: the run's.
    quantity: name and unit. printed, predicted: a number, or a decision as a word. fitted: whether
    constants were calibrated on the point, which excludes it from all rates.
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
        """Relative error; NaN for a decision."""
        if isinstance(self.printed, str) or isinstance(self.predicted, str):
            return math.nan
        return self.predicted / self.printed - 1

    @property
    def hit(self) -> bool:
        """Whether the decision matches, or the number is within the tolerance."""
        if isinstance(self.printed, str) or isinstance(self.predicted, str):
            return self.printed == self.predicted
        return abs(self.error) <= HIT_TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with the relative error of a number."""
        values = dict(vars(self)) | {"hit": self.hit}
        if not math.isnan(self.error):
            values["error"] = round(self.error, 4)
        return values


def summarize_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Count hits by source, without fitted points."""
    rates: dict[str, Any] = {}
    for source in dict.fromkeys(row.source for row in rows):
        source_rows = [row for row in rows if row.source == source and not row.fitted]
        decisions = [row for row in source_rows if math.isnan(row.error)]
        figures = [row for row in source_rows if not math.isnan(row.error)]
        rates[source] = {
            "decisions": len(decisions),
            "decisions_hit": sum(row.hit for row in decisions),
            "figures": len(figures),
            "figures_within_15_percent": sum(row.hit for row in figures),
            "mean_absolute_error": _mean(abs(row.error) for row in figures),
            "fitted": sum(row.fitted for row in rows if row.source == source),
        }
    return rates


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return round(sum(finite) / len(finite), 4) if finite else None


def format_table(rows: Sequence[Row]) -> str:
    """Format points as a Markdown table."""
    lines = [
        "| where | setting | quantity | printed | predicted | |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        cells = (
            row.where,
            row.setting,
            row.quantity,
            _format_value(row.printed),
            _format_value(row.predicted),
            _format_outcome(row),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_outcome(row: Row) -> str:
    error = "" if math.isnan(row.error) else f"{row.error:+.0%} "
    if row.fitted:
        return f"{error}fitted"
    return error + ("hit" if row.hit else "**miss**")


def _format_value(value: Value) -> str:
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "does not fit"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
