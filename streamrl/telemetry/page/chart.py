"""A chart of the run page: traces and layout of Plotly, with the words around it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.messages import Array
from streamrl.telemetry.page.run_record import RunRecord
from streamrl.telemetry.page.step_bins import StepBins

PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b",
    "#ff9da6", "#bab0ac",
)  # fmt: skip
"""Colors of stages, or of runs that are compared: Tableau's, as in Vega."""

ALARM_COLOR = "#e45756"


@dataclass(frozen=True)
class Chart:
    """Chart with a title and a sentence that says how to read it.

    traces, layout: as in Plotly's `Figure`. has_step_axis: the x axis counts training steps; all
    such charts of a page are zoomed together.
    """

    chart_id: str
    title: str
    caption: str
    traces: Sequence[Mapping[str, Any]] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    has_step_axis: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.chart_id,
            "title": self.title,
            "caption": self.caption,
            "traces": list(self.traces),
            "layout": dict(self.layout),
            "hasStepAxis": self.has_step_axis,
        }


def pick_color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def make_line(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    *,
    color: str,
    hover: Sequence[str] | None = None,
    digits: str = ".4~g",
    **more: Any,
) -> dict[str, Any]:
    """Return a line. hover: what each point stands for, in place of its step."""
    label = "%{text}" if hover else "step %{x}"
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "width": 1.8},
        "hovertemplate": f"{label}: %{{y:{digits}}}<extra>{name}</extra>",
        **({"text": list(hover)} if hover else {}),
        **more,
    }


def draw_columns(
    run: RunRecord,
    metrics: Mapping[str, str],
    combine: Callable[[StepBins, Array], list[float | None]] = StepBins.average,
    **more: Any,
) -> list[dict[str, Any]]:
    """Return a line for each metric, by label, that the run has.

    combine: value of a bin of steps, from the metric's column. more: as in `make_line`.
    """
    bins = StepBins.from_steps(run.steps)
    return [
        make_line(
            label,
            bins.last_steps,
            combine(bins, run.get_column(name)),
            hover=bins.labels,
            **{"color": pick_color(i), **more},
        )
        for i, (label, name) in enumerate(metrics.items())
        if run.has_metric(name)
    ]
