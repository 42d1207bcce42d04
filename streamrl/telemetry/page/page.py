"""Page of one or several runs: its data as JSON, the HTML file that holds it, and its server.

    page = RunPage([RunReader(run_dir)], describe_bottleneck)
    html = page.render()             # a file that needs neither network nor server
    data = page.describe()           # later, for a page that follows the run

The charts are drawn by Plotly, whose script is part of the file: traces for the charts of
charts.yaml. A chart without measurements is left out.
"""

import html
import json
import math
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import yaml
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from streamrl.errors import ConfigError
from streamrl.files.printable_text import shorten_text
from streamrl.messages import Array
from streamrl.telemetry.metric_names import (
    CHECKPOINT_TIME,
    EVALUATE_TIME,
    IDLE_PREFIX,
    choose_objective,
)
from streamrl.telemetry.page.run_record import RunReader, RunRecord
from streamrl.telemetry.progress import format_duration, format_number
from streamrl.telemetry.rollout_log import (
    ROLLOUTS_FOLDER,
    groups_to_json,
    list_recorded_steps,
    read_recorded_groups,
)
from streamrl.telemetry.sinks import ALERT_EVENTS, EVENTS_FILE, METRICS_FILE, QUIET_EVENTS

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


_TABLE = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))
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
        if name in run.metric_names
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
    label, metric = choose_objective(run.rows[-1] if run.rows else ())
    traces = draw_metrics(run, {f"{prefix}{label}": metric}, color=color)
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


LOOPBACK = "127.0.0.1"
_STEP = re.compile("[0-9]{1,15}", re.ASCII)
HOST_NAMES = (LOOPBACK, "localhost")
FOLLOW_EVERY_S = 5
"""Time after which a served page asks for what the run has written since."""
MAX_ROLLOUT_BYTES = 8_000_000
"""Most JSON of rollouts in a file; a page that is served has those of all steps."""
_FOLDER = Path(__file__).parent
PAGE_FILES = {
    "@STYLE@": "rollout_view.css",
    "@CONTROLS@": "rollout_view.html",
    "@SCRIPT@": "rollout_view.js",
    "@PAGE_SCRIPT@": "page.js",
}
SHOWN_FILES = (METRICS_FILE, EVENTS_FILE, ROLLOUTS_FOLDER)
_DescribeBottleneck = Callable[[Path, int], Sequence[str]]


class RunPage:
    """Page of runs that may be under way.

    describe_bottleneck: function of a run directory and its number of steps that returns lines of
    text, or why there are none. Construction raises ConfigError for a run that is given twice.
    """

    def __init__(
        self, readers: Sequence[RunReader], describe_bottleneck: _DescribeBottleneck
    ) -> None:
        names = name_runs([reader.run_dir for reader in readers])
        self._readers = dict(zip(names, readers, strict=True))
        self._describe_bottleneck = describe_bottleneck

    def compute_state(self) -> str:
        """Return a text that changes when a run writes something that the page shows."""
        files = [reader.run_dir / name for reader in self._readers.values() for name in SHOWN_FILES]
        stats = [file.stat() if file.exists() else None for file in files]
        return "-".join(f"{s.st_size:x}.{s.st_mtime_ns:x}" if s else "" for s in stats)

    def describe(
        self, *, with_rollouts: bool = False, follow_every_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the data of the page as JSON types.

        with_rollouts: with the rollouts of as many of the latest steps as MAX_ROLLOUT_BYTES hold.
        follow_every_s: time between two requests of a served page, s; 0: it does not follow.
        Raises ConfigError for a damaged file.
        """
        records = [reader.read(name) for name, reader in self._readers.items()]
        return {
            "title": ", ".join(record.name for record in records),
            "followEvery": follow_every_s,
            "charts": list(map(vars, draw_shared_charts(records))),
            "runs": [self._describe_run(record, with_rollouts) for record in records],
        }

    def _describe_run(self, run: RunRecord, with_rollouts: bool) -> dict[str, Any]:
        steps = list_recorded_steps(run.run_dir)
        rollouts = collect_rollouts(run.run_dir, steps) if with_rollouts else {}
        note = "" if steps else "This run has recorded no rollouts."
        if with_rollouts and len(steps) > len(rollouts):
            note = f"Of {len(steps)} recorded steps, the last {len(rollouts)} are in this file."
        return {
            "name": run.name,
            "state": describe_state(run),
            "tiles": [{"label": label, "value": value} for label, value in list_tiles(run)],
            "charts": list(map(vars, draw_run_charts(run))),
            "advice": list(self._describe_bottleneck(run.run_dir, int(max(run.steps, default=0)))),
            "config": run.config_text,
            "rollouts": rollouts,
            "rolloutSteps": list(rollouts) if with_rollouts else steps,
            "rolloutsNote": note,
        }

    def describe_rollouts(self, run_name: str, step: int) -> dict[str, Any] | None:
        """Return the recorded groups of a run's step as JSON types; None for an unknown run."""
        reader = self._readers.get(run_name)
        if reader is None:
            return None
        return groups_to_json(read_recorded_groups(reader.run_dir, step))

    def render(self, *, is_served: bool = False) -> str:
        """Return the page as HTML. is_served: it asks its server for rollouts and new steps."""
        data = self.describe(
            with_rollouts=not is_served, follow_every_s=FOLLOW_EVERY_S if is_served else 0.0
        )
        return fill_template(data, load_plotly_script())


def fill_template(data: object, plotly_script: str) -> str:
    """Return page.html with each part in its place; no text of `data` is taken for a place."""
    parts = {
        place: (_FOLDER / name).read_text(encoding="utf-8") for place, name in PAGE_FILES.items()
    }
    # Only "<" can end a script element.
    parts["@DATA@"] = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts["@PLOTLY@"] = plotly_script
    template = (_FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub("|".join(parts), lambda place: parts[place[0]], template)


def load_plotly_script() -> str:
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def name_runs(run_dirs: Sequence[Path]) -> list[str]:
    """Return the folder names of runs, or their paths if names are equal.

    Raises ConfigError for a run that is given twice.
    """
    paths = [path.resolve() for path in run_dirs]
    for path, given in zip(paths, run_dirs, strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"{given}: given twice; name each run once")
    names = [path.name for path in paths]
    return names if len({*names}) == len(names) else list(map(str, paths))


def collect_rollouts(run_dir: Path, steps: Sequence[int]) -> dict[str, list[Any]]:
    """Return the groups of the latest recorded steps as JSON types, up to MAX_ROLLOUT_BYTES."""
    collected: dict[str, list[Any]] = {}
    size = 0
    for step in reversed(steps):
        groups = groups_to_json(read_recorded_groups(run_dir, step))["groups"]
        size += len(json.dumps({str(step): groups}))
        if collected and size > MAX_ROLLOUT_BYTES:
            break
        collected[str(step)] = groups
    return dict(reversed(collected.items()))


def describe_state(run: RunRecord) -> str:
    """Return whether a run is under way, finished or failed, in words."""
    closings = [event for event in run.events if event.get("event") == "close"]
    starts = [event for event in run.events if event.get("event") == "machine"]
    if closings and (not starts or closings[-1]["time"] >= starts[-1]["time"]):
        return str(closings[-1].get("outcome", "ended"))
    return "under way, or killed"


def list_tiles(run: RunRecord) -> list[tuple[str, str]]:
    """Return labels and values of the numbers at the top of the page."""
    if not run.rows:
        return [("step", "0")]
    last = run.rows[-1]
    label, metric = choose_objective(last)
    values = run.get_column(metric)
    values = values[np.isfinite(values)]
    tiles = [("step", str(last["step"]))]
    if len(values):
        tiles.append((label, f"{format_number(values[0])} \u2192 {format_number(values[-1])}"))
    for name in ("mean_at_k", "pass_at_1"):
        steps, scores = run.get_evaluations(f"eval/{name}")
        if steps:
            change = f"{format_number(scores[0])} \u2192 {format_number(scores[-1])}"
            tiles.append((f"evaluation, {name}", change))
            break
    staleness = run.get_column("staleness/max")
    tiles.append(("largest staleness", format_number(float(staleness.max()), 0)))
    tiles.append(("tokens/s", format_number(last.get("throughput/tokens_per_s") or math.nan, 0)))
    tiles.append(("time", format_duration(run.total_s)))
    idle = {
        name.removeprefix(IDLE_PREFIX): float(run.get_column(name)[-20:].mean())
        for name in run.select_names(IDLE_PREFIX)
    }
    if idle:
        stage = min(idle, key=lambda name: idle[name])
        tiles.append(("busiest stage", f"{stage}, {1 - idle[stage]:.0%}"))
    dropped = last.get("ledger/dropped")
    if dropped:
        tiles.append(("groups dropped", str(dropped)))
    return tiles


# Server: loopback only, with a random token in the address.


class PageServer(ThreadingHTTPServer):
    """HTTP server of a page; `address` is what to open.

    port: 0 picks a free one. Construction raises ConfigError if the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, page: RunPage, *, port: int = 0) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(16)
        # Reading a run changes what its reader remembers: one request at a time.
        self.page_lock = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), PageHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}; leave it out to take a free one") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing for a connection that its browser closed, as by a reload."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop `serve_forever`, which another thread runs, and free the port."""
        self.shutdown()
        self.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """Answers a request that has the token."""

    server: PageServer
    server_version = "streamrl"
    sys_version = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not self._is_allowed(query.get("token", "")):
            self._send("open the address that streamrl view prints", HTTPStatus.FORBIDDEN)
            return
        try:
            with self.server.page_lock:
                self._answer(parts.path, query)
        except ConfigError as error:
            self._send(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)

    def _is_allowed(self, token: str) -> bool:
        # A page of another site, whose name resolves to this machine, names its own host.
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        is_token = secrets.compare_digest(token.encode(), self.server.token.encode())
        return host in HOST_NAMES and is_token

    def _answer(self, path: str, query: dict[str, str]) -> None:
        page = self.server.page
        match path:
            case "/":
                self._send(page.render(is_served=True), content_type="text/html")
            case "/data":
                state = page.compute_state()
                if query.get("state") == state:
                    self._send("", HTTPStatus.NO_CONTENT)
                else:
                    data = page.describe(follow_every_s=FOLLOW_EVERY_S)
                    self._send_json({**data, "state": state})
            case "/rollouts" if _STEP.fullmatch(query.get("step", "")):
                groups = page.describe_rollouts(query.get("run", ""), int(query["step"]))
                self._send_json(groups or {"groups": []})
            case _:
                self._send("no such page", HTTPStatus.NOT_FOUND)

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value, allow_nan=False), content_type="application/json")

    def _send(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, *, content_type: str = "text/plain"
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal shows the address."""
