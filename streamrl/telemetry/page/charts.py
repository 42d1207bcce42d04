"""Charts of the run page: traces of Plotly for the charts of charts.yaml.

A chart without measurements is left out.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from streamrl.messages import Array
from streamrl.telemetry.metric_names import CHECKPOINT_TIME, EVALUATE_TIME, IDLE_PREFIX
from streamrl.telemetry.page.run_record import RunRecord
from streamrl.telemetry.sinks import ALERT_EVENTS, QUIET_EVENTS

PALETTE = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b",
    "#ff9da6", "#bab0ac",
)  # fmt: skip
"""Colors of stages, or of runs that are compared: Tableau's, as in Vega."""
ALARM_COLOR = "#e45756"
ALARMING_EVENTS = frozenset({*ALERT_EVENTS, "drop"})
MAX_EVENTS = 400
"""Most events in a chart; the latest are shown."""
MAX_ALARMS = 40
"""Most alarming events marked in every chart over steps."""
Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """Chart with a title and a sentence that says how to read it.

    traces, layout: as in Plotly's `Figure`; the x axis counts training steps. metrics, style, runs:
    as in charts.yaml.
    """

    chart_id: str
    title: str
    caption: str
    traces: Sequence[Trace] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    style: Mapping[str, Any] = field(default_factory=dict)
    runs: bool = False

    def with_layout(self, traces: Sequence[Trace], **layout: Any) -> "Chart":
        """Return the chart with traces, and more of its layout."""
        return replace(self, traces=traces, layout={**self.layout, **layout})


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CHARTS = {name: Chart(name, **words) for name, words in _TABLE.items()}


def draw_shared_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts in which all runs lie over each other."""
    drawn = []
    for chart in CHARTS.values():
        if chart.runs:
            draw = draw_reward if chart.chart_id == "reward" else draw_metric
            traces = [
                trace
                for i, run in enumerate(runs)
                for trace in draw(chart, run, pick_color(i), is_alone=len(runs) == 1)
            ]
            has_legend = len(runs) > 1 or chart.chart_id == "reward"
            drawn.append(chart.with_layout(traces, showlegend=has_legend))
    drawn = [chart for chart in drawn if chart.traces]
    return [mark_alarms(chart, runs[0]) for chart in drawn] if len(runs) == 1 else drawn


def draw_run_charts(run: RunRecord) -> list[Chart]:
    """Return the charts of a run that has the measurements for them."""
    charts = [
        DRAWERS.get(chart.chart_id, draw_lines)(chart, run)
        for chart in CHARTS.values()
        if not chart.runs
    ]
    return [mark_alarms(chart, run) for chart in charts if chart.traces]


# Lines.


def pick_color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def list_values(column: Array) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in column]


def make_line(
    name: str, x: Sequence[float], y: Sequence[float | None], *, color: str, **more: Any
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "width": 1.8},
        "hovertemplate": f"step %{{x}}: %{{y:.4~g}}<extra>{name}</extra>",
        **more,
    }


def make_run_line(run: RunRecord, label: str, column: Array, *, color: str, **more: Any) -> Trace:
    """Return a line over the steps of a run. A point may stand for several steps."""
    hover = f"%{{text}}: %{{y:.4~g}}<extra>{label}</extra>"
    more = {"text": run.step_labels, "hovertemplate": hover, **more}
    return make_line(label, run.steps.tolist(), list_values(column), color=color, **more)


def draw_metrics(run: RunRecord, metrics: Mapping[str, str], **more: Any) -> list[Trace]:
    """Return a line for each metric, by label, that the run has. more: as in `make_line`."""
    return [
        make_run_line(run, label, run.get_column(name), **{"color": pick_color(i), **more})
        for i, (label, name) in enumerate(metrics.items())
        if run.has_metric(name)
    ]


def draw_metric(chart: Chart, run: RunRecord, color: str, *, is_alone: bool) -> list[Trace]:
    """Return the line of a run in a chart of several runs."""
    return draw_metrics(run, {run.name: chart.metrics[""]}, color=color)


def draw_lines(chart: Chart, run: RunRecord) -> Chart:
    metrics: dict[str, str] = {}
    for label, metric in chart.metrics.items():
        if metric.endswith("/"):
            names = run.select_names(metric)
            metrics |= {n.removeprefix(metric).removesuffix("_mb"): n for n in names}
        else:
            metrics[label] = metric
    return replace(chart, traces=draw_metrics(run, metrics, **chart.style))


def draw_reward(chart: Chart, run: RunRecord, color: str, *, is_alone: bool) -> list[Trace]:
    """Return the reward of training and evaluations of a run."""
    prefix = "" if is_alone else f"{run.name}: "
    traces = draw_metrics(run, {f"{prefix}reward": "reward/mean"}, color=color)
    color = pick_color(1) if is_alone else color
    for name in ("mean_at_k", "pass_at_1"):
        steps, values = run.get_evaluations(f"eval/{name}")
        # Rewards of 0 and 1: both metrics are the same.
        if not steps or any(trace["y"] == values for trace in traces):
            continue
        low, high = (
            dict(zip(*run.get_evaluations(f"eval/interval/{name}_{bound}"), strict=True))
            for bound in ("low", "high")
        )
        pairs = list(zip(steps, values, strict=True))
        line = make_line(f"{prefix}evaluation, {name}", steps, values, color=color)
        line["mode"] = "lines+markers"
        line["line"] = {"color": color, "width": 1.2, "dash": "dot"}
        line["error_y"] = {
            "type": "data",
            "symmetric": False,
            "thickness": 1,
            "array": [abs(high.get(step, value) - value) for step, value in pairs],
            "arrayminus": [abs(value - low.get(step, value)) for step, value in pairs],
        }
        traces.append(line)
    return traces


def draw_step_time(chart: Chart, run: RunRecord) -> Chart:
    """Draw the seconds per step in which each stage computed, beside the step's time."""
    step_s, traces = run.get_column("time/step_s"), []
    for i, name in enumerate(run.select_names(IDLE_PREFIX)):
        busy_s = (1.0 - run.get_column(name)) * step_s
        stage = name.removeprefix(IDLE_PREFIX)
        traces.append(make_run_line(run, stage, busy_s, color=pick_color(i)))
    if traces:
        traces += draw_metrics(run, {"evaluation": EVALUATE_TIME}, color="#b279a2", mode="markers")
        traces += draw_metrics(
            run, {"checkpoint": CHECKPOINT_TIME}, color="#333333", mode="markers"
        )
        dashes = {"color": "#888888", "width": 1.8, "dash": "dash"}
        traces += draw_metrics(run, {"whole step": "time/step_s"}, line=dashes)
    return replace(chart, traces=traces)


# Staleness.


def draw_staleness(chart: Chart, run: RunRecord) -> Chart:
    """Draw the share of trained tokens by staleness as a heat map, with mean and largest."""
    counts = run.get_staleness_counts()
    if not counts.size:
        return chart
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.full(counts.shape, math.nan), where=totals > 0)
    hover = "%{text}, %{y} versions old: %{z:.1%} of the tokens<extra></extra>"
    heat = {
        "type": "heatmap",
        "name": "tokens",
        "x": run.steps.tolist(),
        "y": list(range(counts.shape[1])),
        "z": [list_values(values) for values in shares.T.round(4)],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "#f7fbff"], [1, "#08519c"]],
        "colorbar": {"tickformat": ".0%", "thickness": 12},
        "text": [run.step_labels] * counts.shape[1],
        "hovertemplate": hover,
    }
    mean = make_run_line(run, "mean", run.get_column("staleness/mean"), color="#f58518")
    largest = make_run_line(run, "largest", run.get_column("staleness/max"), color="#e45756")
    return replace(chart, traces=[heat, mean, largest])


# Events.


def draw_events(chart: Chart, run: RunRecord) -> Chart:
    """Draw the events of a run, a row for each name."""
    events = [e for e in name_endings(run.events) if e.get("event") not in QUIET_EVENTS]
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for event in events[-MAX_EVENTS:]:
        by_name.setdefault(str(event["event"]), []).append(event)
    traces: list[Trace] = []
    for name, chosen in by_name.items():
        color = ALARM_COLOR if name in ALARMING_EVENTS else "#4c78a8"
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [run.find_step_at(event["time"]) for event in chosen],
            "y": [name] * len(chosen),
            "text": [describe_event(event) for event in chosen],
            "marker": {"size": 9, "symbol": "diamond", "color": color},
            "hovertemplate": "%{text}<extra></extra>",
        }
        traces.append(trace)
    # Room for a marker at the last step.
    xaxis = {"range": [0, 1.01 * int(max(run.steps, default=1))]}
    return chart.with_layout(traces, height=110 + 24 * len(traces), xaxis=xaxis)


def name_endings(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return events with starts after the first as "resumed", and ends by their outcome."""
    named: list[Mapping[str, Any]] = []
    has_started = False
    for event in events:
        name = event.get("event")
        if name == "machine" and has_started:
            event = {**event, "event": "resumed"}
        elif name == "close" and event.get("outcome") != "finished":
            event = {**event, "event": str(event.get("outcome", "ended"))}
        has_started = has_started or name == "machine"
        named.append(event)
    return named


def describe_event(event: Mapping[str, Any]) -> str:
    """Return an event in words, as HTML that Plotly shows: a line per field."""
    facts = {name: value for name, value in event.items() if name not in ("event", "time")}
    fields = [f"{name}: {shorten_text(str(value))}" for name, value in facts.items()]
    # Plotly renders some HTML tags in texts.
    return "<br>".join(html.escape(text, quote=False) for text in (str(event["event"]), *fields))


def shorten_text(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def make_vertical_line(x: float, color: str) -> dict[str, Any]:
    line = {"color": color, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def mark_alarms(chart: Chart, run: RunRecord) -> Chart:
    """Return a chart over steps with a vertical line at each alarming event."""
    alarms = [e for e in run.events if e.get("event") in ALARMING_EVENTS][-MAX_ALARMS:]
    if not alarms:
        return chart
    steps = sorted({run.find_step_at(event["time"]) for event in alarms})
    lines = [make_vertical_line(step, ALARM_COLOR) for step in steps]
    return chart.with_layout(chart.traces, shapes=lines)


DRAWERS: Mapping[str, Callable[[Chart, RunRecord], Chart]] = {
    "staleness": draw_staleness,
    "step_time": draw_step_time,
    "events": draw_events,
}
