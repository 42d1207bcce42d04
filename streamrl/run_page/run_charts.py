"""Charts of a run, in the order of its stream: from reward to the devices' time line.

Each function returns None for a run without the measurements of its chart.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.run_page.chart import Chart, make_line, pick_color
from streamrl.run_page.run_record import RunRecord
from streamrl.run_page.step_bins import StepBins, to_shares
from streamrl.telemetry.progress import DEPTH_PREFIX, IDLE_PREFIX
from streamrl.telemetry.sinks import ALERT_EVENTS, BASE_EVALUATION
from streamrl.telemetry.spans import Span

QUIET_EVENTS = frozenset({"machine", "note", BASE_EVALUATION, "close"})
"""Events that say nothing about how the run went."""
ALARMING_EVENTS = frozenset({*ALERT_EVENTS, "crashed", "failed", "drop"})
MAX_EVENTS = 400
"""Most events in a chart; the latest are shown."""
TIMELINE_STEPS = 3
MAX_TIMELINE_SPANS = 2000


def draw_queue(run: RunRecord) -> Chart | None:
    """Draw the groups that wait for each stage, stacked."""
    names = run.select_names(DEPTH_PREFIX)
    if not names:
        return None
    bins = StepBins.from_steps(run.steps)
    traces = [
        make_line(
            name.removeprefix(DEPTH_PREFIX),
            bins.last_steps,
            bins.average(run.get_column(name)),
            color=pick_color(i),
            hover=bins.labels,
            stackgroup="depth",
        )
        for i, name in enumerate(names)
    ]
    return Chart(
        "queue",
        "Queue depth",
        "Groups that wait for each stage. A band that grows belongs to a stage slower than those"
        " before it.",
        traces,
        {"yaxis": {"title": {"text": "groups"}}},
    )


def draw_staleness(run: RunRecord) -> Chart | None:
    """Draw the share of trained tokens by staleness as a heat map, with mean and largest."""
    counts = run.get_staleness_counts()
    if not counts.size:
        return None
    bins = StepBins.from_steps(run.steps)
    shares = to_shares(bins.add_up(counts))
    x = bins.last_steps
    heat = {
        "type": "heatmap",
        "name": "tokens",
        "x": x,
        "y": list(range(counts.shape[1])),
        "z": [list(values) for values in zip(*shares, strict=True)],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "#f7fbff"], [1, "#08519c"]],
        "colorbar": {"title": {"text": "share of tokens"}, "tickformat": ".0%", "thickness": 12},
        "hovertemplate": "step %{x}, %{y} versions old: %{z:.1%} of the tokens<extra></extra>",
    }
    mean = bins.average(run.get_column("staleness/mean"))
    largest = bins.take_largest(run.get_column("staleness/max"))
    return Chart(
        "staleness",
        "Staleness",
        "How many versions behind the trainer the tokens of a step were sampled.",
        [
            heat,
            make_line("mean", x, mean, color="#f58518", hover=bins.labels),
            make_line("largest", x, largest, color="#e45756", hover=bins.labels),
        ],
        {"yaxis": {"title": {"text": "versions"}, "dtick": 1}, "legend": {"orientation": "h"}},
    )


def draw_idle(run: RunRecord) -> Chart | None:
    """Draw the idle fraction of each stage as a heat map."""
    names = run.select_names(IDLE_PREFIX)
    if not names:
        return None
    bins = StepBins.from_steps(run.steps)
    heat = {
        "type": "heatmap",
        "x": bins.last_steps,
        "y": [name.removeprefix(IDLE_PREFIX) for name in names],
        "z": [bins.average(run.get_column(name)) for name in names],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "#ffffcc"], [0.5, "#feb24c"], [1, "#b10026"]],
        "colorbar": {"title": {"text": "idle"}, "tickformat": ".0%", "thickness": 12},
        "hovertemplate": "%{y}, step %{x}: %{z:.1%} idle<extra></extra>",
    }
    return Chart(
        "idle",
        "Idle time",
        "Share of a step in which a stage did not compute. The palest row is the bottleneck.",
        [heat],
        {"yaxis": {"autorange": "reversed"}},
    )


def draw_step_time(run: RunRecord) -> Chart | None:
    """Draw the seconds per step in which each stage computed, beside the step's time."""
    names = run.select_names(IDLE_PREFIX)
    if not names or not run.has_metric("time/step_s"):
        return None
    bins, step_s = StepBins.from_steps(run.steps), run.get_column("time/step_s")
    traces = [
        make_line(
            name.removeprefix(IDLE_PREFIX),
            bins.last_steps,
            bins.average((1.0 - run.get_column(name)) * step_s),
            color=pick_color(i),
            hover=bins.labels,
        )
        for i, name in enumerate(names)
    ]
    whole = make_line(
        "whole step",
        bins.last_steps,
        bins.average(step_s),
        color="#888888",
        hover=bins.labels,
    )
    whole["line"] = {"color": "#888888", "width": 1.8, "dash": "dash"}
    return Chart(
        "step_time",
        "Where a step's time went",
        "Seconds in which each stage computed. Stages overlap; the one that touches the dashed"
        " line determines the step's time.",
        [*traces, whole],
        {"yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}},
    )


def draw_weights(run: RunRecord) -> Chart | None:
    """Draw the times to publish, pull and load a version."""
    kinds = {"publish": "weights/publish_s", "pull": "weights/pull_s", "pause": "weights/pause_s"}
    bins = StepBins.from_steps(run.steps)
    traces = [
        make_line(
            kind,
            bins.last_steps,
            bins.average(run.get_column(name)),
            color=pick_color(i),
            hover=bins.labels,
            connectgaps=True,
        )
        for i, (kind, name) in enumerate(kinds.items())
        if run.has_metric(name)
    ]
    if not traces:
        return None
    return Chart(
        "weights",
        "Weights",
        "Publish: from the optimizer step until the version can be read. Pull: from its"
        " announcement until a generator uses it. Pause: sampling stood still.",
        traces,
        {"yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}},
    )


def draw_memory(run: RunRecord) -> Chart | None:
    names = run.select_names("memory/")
    if not names:
        return None
    bins = StepBins.from_steps(run.steps)
    traces = [
        make_line(
            name.removeprefix("memory/").removesuffix("_mb"),
            bins.last_steps,
            bins.take_largest(run.get_column(name)),
            color=pick_color(i),
            hover=bins.labels,
            connectgaps=True,
        )
        for i, name in enumerate(names)
    ]
    return Chart(
        "memory",
        "Memory",
        "Peak memory of a worker in each phase of a colocated run.",
        traces,
        {"yaxis": {"title": {"text": "MB"}, "rangemode": "tozero"}},
    )


def draw_episodes(run: RunRecord) -> Chart | None:
    """Draw where the time of episodes goes, and their turns."""
    shares = {
        "engine samples": "episode/decode_frac",
        "waits for a slot": "episode/wait_frac",
        "waits for the environment": "episode/environment_frac",
    }
    if not all(run.has_metric(name) for name in shares.values()):
        return None
    bins = StepBins.from_steps(run.steps)
    traces = [
        make_line(
            name,
            bins.last_steps,
            bins.average(run.get_column(metric)),
            color=pick_color(i),
            hover=bins.labels,
            digits=".1%",
            stackgroup="share",
        )
        for i, (name, metric) in enumerate(shares.items())
    ]
    turns = make_line(
        "turns",
        bins.last_steps,
        bins.average(run.get_column("episode/turns")),
        color="#333333",
        hover=bins.labels,
        yaxis="y2",
        connectgaps=True,
    )
    return Chart(
        "episodes",
        "Episodes",
        "Where the time of an episode goes, and its mean number of turns (right axis).",
        [*traces, turns],
        {
            "yaxis": {"tickformat": ".0%", "range": [0, 1]},
            "yaxis2": {
                "overlaying": "y",
                "side": "right",
                "title": {"text": "turns"},
                "rangemode": "tozero",
                "showgrid": False,
            },
        },
    )


def draw_ledger(run: RunRecord) -> Chart | None:
    """Draw what became of the admitted prompts as a flow."""
    if not run.rows:
        return None
    last = run.rows[-1]
    outcomes = {
        "trained": last.get("ledger/trained"),
        "filtered": last.get("ledger/filtered"),
        **{
            f"dropped: {name.removeprefix('drops/')}": last.get(name)
            for name in run.select_names("drops/")
        },
        "in flight": last.get("ledger/in_flight"),
    }
    flows = {name: value for name, value in outcomes.items() if value}
    if not flows:
        return None
    colors = {"trained": "#54a24b", "filtered": "#eeca3b", "in flight": "#9ecae9"}
    labels = [f"admitted ({last.get('ledger/admitted')})"]
    labels += [f"{name} ({value})" for name, value in flows.items()]
    sankey = {
        "type": "sankey",
        "node": {
            "label": labels,
            "color": ["#4c78a8", *(colors.get(name, "#e45756") for name in flows)],
            "pad": 18,
            "hovertemplate": "%{label} groups<extra></extra>",
        },
        "link": {
            "source": [0] * len(flows),
            "target": list(range(1, len(flows) + 1)),
            "value": list(flows.values()),
            "hovertemplate": "%{value} groups<extra></extra>",
        },
    }
    return Chart(
        "ledger",
        "Ledger",
        "What became of every prompt that was admitted, until the last step.",
        [sankey],
        has_step_axis=False,
    )


def draw_events(run: RunRecord) -> Chart | None:
    """Draw the events of a run, a row for each name."""
    events = [e for e in run.events if e.get("event") not in QUIET_EVENTS][-MAX_EVENTS:]
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
                    "color": "#e45756" if name in ALARMING_EVENTS else "#4c78a8",
                },
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return Chart(
        "events",
        "Events",
        "When actors died and restarted, groups were dropped, checkpoints written.",
        traces,
        {
            "showlegend": False,
            "height": 110 + 24 * len(names),
            "xaxis": {"range": [0, int(max(run.steps, default=1))]},
        },
    )


def describe_event(event: Mapping[str, Any]) -> str:
    """Return an event in words, as HTML that Plotly shows: a line per field."""
    fields = [
        f"{name}: {_shorten(str(value))}"
        for name, value in event.items()
        if name not in ("event", "time")
    ]
    return "<br>".join(map(escape_text, [str(event["event"]), *fields]))


def escape_text(text: str) -> str:
    """Return text that Plotly shows as it is: it renders some HTML tags in texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def draw_timeline(run: RunRecord, spans: Sequence[Span]) -> Chart | None:
    """Draw what each process did in the last TIMELINE_STEPS steps."""
    if not len(run.end_times) or not spans:
        return None
    end_s = min(run.end_times[-1], max(span.end_s for span in spans))
    first = max(0, len(run.end_times) - 1 - TIMELINE_STEPS)
    start_s = (
        run.end_times[first] if len(run.end_times) > 1 else end_s - run.get_column("time/step_s")[0]
    )
    shown = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    shown = sorted(shown, key=lambda span: span.start_s)[-MAX_TIMELINE_SPANS:]
    if not shown:
        return None
    names = list(dict.fromkeys(span.name for span in shown))
    traces = []
    for i, name in enumerate(names):
        chosen = [span for span in shown if span.name == name]
        starts = [max(span.start_s, start_s) - start_s for span in chosen]
        ends = [min(span.end_s, end_s) - start_s for span in chosen]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [span.process for span in chosen],
                "base": starts,
                "x": [end - start for start, end in zip(starts, ends, strict=True)],
                "marker": {"color": pick_color(i), "opacity": 0.55},
                "text": [_describe_span(span) for span in chosen],
                "textposition": "none",
                "hovertemplate": "%{text}<extra>%{y}</extra>",
            }
        )
    ticks = [
        {"type": "line", "x0": t, "x1": t, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": "#888888", "width": 1, "dash": "dot"}}
        for t in (run.end_times[first:] - start_s).tolist()
    ]  # fmt: skip
    processes = sorted({span.process for span in shown}, reverse=True)
    return Chart(
        "timeline",
        f"The last {min(TIMELINE_STEPS, len(run.rows))} steps",
        "What each process did when. Dotted lines are ends of steps.",
        traces,
        {
            "barmode": "overlay",
            "xaxis": {"title": {"text": "seconds"}},
            "yaxis": {"categoryorder": "array", "categoryarray": processes},
            "shapes": ticks,
            "height": 120 + 30 * len(processes),
        },
        has_step_axis=False,
    )


def _describe_span(span: Span) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in span.args.items())
    return escape_text(_shorten(f"{span.name} {span.end_s - span.start_s:.3g} s {facts}"))


RUN_CHARTS: Sequence[Callable[[RunRecord], Chart | None]] = (
    draw_queue,
    draw_staleness,
    draw_idle,
    draw_step_time,
    draw_episodes,
    draw_weights,
    draw_ledger,
    draw_memory,
    draw_events,
)
"""Charts of a single run, from its metrics and events alone."""


def draw_run_charts(run: RunRecord, spans: Sequence[Span]) -> list[Chart]:
    """Return the charts of a run that has the measurements for them."""
    charts = [draw(run) for draw in RUN_CHARTS]
    return [chart for chart in (*charts, draw_timeline(run, spans)) if chart is not None]


def draw_reward(runs: Sequence[RunRecord]) -> Chart | None:
    """Draw the reward of training and evaluations of one or several runs."""
    traces = []
    for i, run in enumerate(runs):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        bins = StepBins.from_steps(run.steps)
        if run.has_metric("reward/mean"):
            traces.append(
                make_line(
                    f"{prefix}reward",
                    bins.last_steps,
                    bins.average(run.get_column("reward/mean")),
                    color=pick_color(i),
                    hover=bins.labels,
                )
            )
        traces += _draw_evaluations(run, prefix, color_index=i if len(runs) > 1 else 1)
    if not traces:
        return None
    return Chart(
        "reward",
        "Reward and evaluation",
        "Mean reward of the rollouts trained in a step, and evaluations on held-out prompts with"
        " their 95 % intervals.",
        traces,
        {"yaxis": {"title": {"text": "score"}}},
    )


def _draw_evaluations(run: RunRecord, prefix: str, color_index: int) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for metric in ("eval/mean_at_k", "eval/pass_at_1"):
        steps, values = run.get_evaluations(metric)
        if not steps:
            continue
        name = metric.removeprefix("eval/")
        bounds = [
            dict(zip(*run.get_evaluations(f"eval/interval/{name}_{b}"), strict=True))
            for b in ("low", "high")
        ]
        errors = [
            [abs(bound.get(step, value) - value) for step, value in zip(steps, values, strict=True)]
            for bound in bounds
        ]
        color = pick_color(color_index + 2 * len(traces))
        line = make_line(f"{prefix}evaluation, {name}", steps, values, color=color)
        line |= {
            "mode": "lines+markers",
            "error_y": {
                "type": "data", "symmetric": False, "array": errors[1], "arrayminus": errors[0],
                "thickness": 1,
            },
        }  # fmt: skip
        line["line"] = {"color": color, "width": 1.2, "dash": "dot"}
        traces.append(line)
        if values == run.get_evaluations("eval/pass_at_1")[1]:
            break  # rewards of 0 and 1: both metrics are the same
    return traces


def draw_throughput(runs: Sequence[RunRecord]) -> Chart | None:
    return _draw_metric(
        runs,
        "throughput/tokens_per_s",
        Chart(
            "throughput",
            "Throughput",
            "Trained tokens per second.",
            (),
            {"yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"}},
        ),
    )


def draw_lengths(runs: Sequence[RunRecord]) -> Chart | None:
    return _draw_metric(
        runs,
        "rollout/length_mean",
        Chart(
            "lengths",
            "Length of rollouts",
            "Mean sampled tokens of a rollout.",
            (),
            {"yaxis": {"title": {"text": "tokens"}, "rangemode": "tozero"}},
        ),
    )


def draw_entropy(runs: Sequence[RunRecord]) -> Chart | None:
    return _draw_metric(
        runs,
        "policy/entropy",
        Chart(
            "entropy",
            "Entropy of the policy",
            "A fall to zero means that all rollouts of a group become the same, and nothing is"
            " learned any more.",
            (),
            {"yaxis": {"title": {"text": "nats per token"}, "rangemode": "tozero"}},
        ),
    )


def _draw_metric(runs: Sequence[RunRecord], metric: str, chart: Chart) -> Chart | None:
    """Return a chart with a metric's line of each run."""
    traces = []
    for i, run in enumerate(runs):
        if run.has_metric(metric):
            bins = StepBins.from_steps(run.steps)
            values = bins.average(run.get_column(metric))
            traces.append(
                make_line(run.name, bins.last_steps, values, color=pick_color(i), hover=bins.labels)
            )
    layout = {**chart.layout, "showlegend": len(runs) > 1}
    return Chart(chart.chart_id, chart.title, chart.caption, traces, layout) if traces else None


SHARED_CHARTS = (draw_reward, draw_throughput, draw_lengths, draw_entropy)
"""Charts in which several runs lie over each other."""


def draw_shared_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts in which all runs lie over each other."""
    charts = [draw(runs) for draw in SHARED_CHARTS]
    return [chart for chart in charts if chart is not None]
