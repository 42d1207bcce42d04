"""Events of a run as a chart, and alarming ones as lines in the charts over steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamrl.telemetry.page.chart import ALARM_COLOR, Chart
from streamrl.telemetry.page.run_record import RunRecord
from streamrl.telemetry.sinks import ALERT_EVENTS, QUIET_EVENTS

ALARMING_EVENTS = frozenset({*ALERT_EVENTS, "drop"})
MAX_EVENTS = 400
"""Most events in a chart; the latest are shown."""
MAX_ALARMS = 40
"""Most alarming events marked in every chart over steps."""


def draw_events(run: RunRecord) -> Chart | None:
    """Draw the events of a run, a row for each name."""
    events = [e for e in name_endings(run.events) if e.get("event") not in QUIET_EVENTS]
    events = events[-MAX_EVENTS:]
    if not events:
        return None
    names = list(dict.fromkeys(str(event["event"]) for event in events))
    traces = []
    for name in names:
        chosen = [event for event in events if event["event"] == name]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [run.find_step_at(event["time"]) for event in chosen],
                "y": [name] * len(chosen),
                "text": [describe_event(event) for event in chosen],
                "marker": {
                    "size": 9,
                    "symbol": "diamond",
                    "color": ALARM_COLOR if name in ALARMING_EVENTS else "#4c78a8",
                },
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return Chart(
        "events",
        "Events",
        "When actors died and restarted, groups were dropped, checkpoints written. Red ones are"
        " dotted lines in all charts over steps.",
        traces,
        {
            "showlegend": False,
            "height": 110 + 24 * len(names),
            # Room for a marker at the last step.
            "xaxis": {"range": [0, 1.01 * int(max(run.steps, default=1))]},
        },
    )


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
    fields = [
        f"{name}: {shorten_text(str(value))}"
        for name, value in event.items()
        if name not in ("event", "time")
    ]
    return "<br>".join(map(escape_text, [str(event["event"]), *fields]))


def escape_text(text: str) -> str:
    """Return text that Plotly shows as it is: it renders some HTML tags in texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shorten_text(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def mark_alarms(chart: Chart, run: RunRecord) -> Chart:
    """Return a chart over steps with a vertical line at each alarming event."""
    alarms = [e for e in run.events if e.get("event") in ALARMING_EVENTS][-MAX_ALARMS:]
    if not alarms or not chart.has_step_axis:
        return chart
    lines = [
        {"type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": ALARM_COLOR, "width": 1, "dash": "dot"}}
        for step in sorted({run.find_step_at(event["time"]) for event in alarms})
    ]  # fmt: skip
    return replace(chart, layout={**chart.layout, "shapes": lines})
