"""Charts of a single run, in the order of its stream: from the queue to the devices' time line.

Each function returns None for a run without the measurements of its chart.
"""

from collections.abc import Callable, Sequence

from streamrl.telemetry.metric_names import CHECKPOINT_TIME, EVALUATE_TIME
from streamrl.telemetry.page.chart import ALARM_COLOR, Chart, draw_columns, make_line, pick_color
from streamrl.telemetry.page.event_chart import draw_events, escape_text, mark_alarms, shorten_text
from streamrl.telemetry.page.run_record import RunRecord
from streamrl.telemetry.page.step_bins import StepBins, to_shares
from streamrl.telemetry.progress import DEPTH_PREFIX, IDLE_PREFIX
from streamrl.telemetry.spans import Span

TIMELINE_STEPS = 3
MAX_TIMELINE_SPANS = 2000


def draw_queue(run: RunRecord) -> Chart | None:
    """Draw the groups that wait for each stage, stacked."""
    names = run.select_names(DEPTH_PREFIX)
    if not names:
        return None
    stages = {name.removeprefix(DEPTH_PREFIX): name for name in names}
    return Chart(
        "queue",
        "Queue depth",
        "Groups that wait for each stage. A band that grows belongs to a stage slower than those"
        " before it.",
        draw_columns(run, stages, stackgroup="depth"),
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
        "text": [bins.labels] * counts.shape[1],
        "hovertemplate": "%{text}, %{y} versions old: %{z:.1%} of the tokens<extra></extra>",
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
        "text": [bins.labels] * len(names),
        "hovertemplate": "%{y}, %{text}: %{z:.1%} idle<extra></extra>",
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
    traces += draw_columns(run, {"evaluation": EVALUATE_TIME}, color="#b279a2", mode="markers")
    traces += draw_columns(run, {"checkpoint": CHECKPOINT_TIME}, color="#333333", mode="markers")
    dashes = {"color": "#888888", "width": 1.8, "dash": "dash"}
    traces += draw_columns(run, {"whole step": "time/step_s"}, line=dashes)
    return Chart(
        "step_time",
        "Where a step's time went",
        "Seconds in which each stage computed. Stages overlap; the one that touches the dashed"
        " line determines the step's time. Training waits for an evaluation and a checkpoint.",
        traces,
        {"yaxis": {"title": {"text": "seconds"}, "rangemode": "tozero"}},
    )


def draw_weights(run: RunRecord) -> Chart | None:
    """Draw the times to publish, pull and load a version."""
    kinds = {"publish": "weights/publish_s", "pull": "weights/pull_s", "pause": "weights/pause_s"}
    traces = draw_columns(run, kinds, connectgaps=True)
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
    phases = {name.removeprefix("memory/").removesuffix("_mb"): name for name in names}
    return Chart(
        "memory",
        "Memory",
        "Peak memory of a worker in each phase of a colocated run.",
        draw_columns(run, phases, StepBins.take_largest, connectgaps=True),
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
    traces = draw_columns(run, shares, digits=".1%", stackgroup="share")
    traces += draw_columns(
        run, {"turns": "episode/turns"}, color="#333333", yaxis="y2", connectgaps=True
    )
    return Chart(
        "episodes",
        "Episodes",
        "Where the time of an episode goes, and its mean number of turns (right axis).",
        traces,
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
    shown = [colors.get(name, ALARM_COLOR) for name in flows]
    labels = [f"admitted ({last.get('ledger/admitted')})"]
    labels += [f"{name} ({value})" for name, value in flows.items()]
    sankey = {
        "type": "sankey",
        "node": {
            "label": labels,
            "color": ["#4c78a8", *shown],
            "pad": 18,
            "hovertemplate": "%{label}<extra></extra>",
        },
        "link": {
            "source": [0] * len(flows),
            "target": list(range(1, len(flows) + 1)),
            "value": list(flows.values()),
            # Plotly's own color suits an opaque background; the page's is transparent.
            "color": [f"{color}66" for color in shown],
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


def draw_timeline(run: RunRecord, spans: Sequence[Span]) -> Chart | None:
    """Draw what each process did in the last TIMELINE_STEPS steps."""
    if not run.rows or not spans:
        return None
    bounds = run.step_bounds[-1 - TIMELINE_STEPS :]
    start_s, end_s = bounds[0], bounds[-1]
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
        for t in (bounds - start_s).tolist()
    ]  # fmt: skip
    waits = run.get_column(EVALUATE_TIME)[-len(bounds) + 1 :]
    evaluations = [
        {"type": "rect", "x0": t, "x1": t + wait_s, "y0": 0, "y1": 1, "yref": "paper",
         "fillcolor": "#888888", "opacity": 0.15, "line": {"width": 0}}
        for t, wait_s in zip((bounds[:-1] - start_s).tolist(), waits.tolist(), strict=True)
        if wait_s > 0
    ]  # fmt: skip
    num_steps = len(bounds) - 1
    processes = sorted({span.process for span in shown}, reverse=True)
    return Chart(
        "timeline",
        f"The last {num_steps} steps" if num_steps > 1 else "The last step",
        "What each process did when. Dotted lines are ends of steps. Training waits for an"
        " evaluation where it is gray.",
        traces,
        {
            "barmode": "overlay",
            "xaxis": {"title": {"text": "seconds"}},
            "yaxis": {"categoryorder": "array", "categoryarray": processes},
            "shapes": [*ticks, *evaluations],
            "height": 120 + 30 * len(processes),
        },
        has_step_axis=False,
    )


def _describe_span(span: Span) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in span.args.items())
    return escape_text(shorten_text(f"{span.name} {span.end_s - span.start_s:.3g} s {facts}"))


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
    charts = [*(draw(run) for draw in RUN_CHARTS), draw_timeline(run, spans)]
    return [mark_alarms(chart, run) for chart in charts if chart is not None]
