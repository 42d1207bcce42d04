"""Charts in which several runs lie over each other: reward and evaluation, and single metrics."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streamrl.run_page.chart import Chart, draw_columns, make_line, pick_color
from streamrl.run_page.event_chart import mark_alarms
from streamrl.run_page.run_record import RunRecord


def draw_reward(runs: Sequence[RunRecord]) -> Chart | None:
    """Draw the reward of training and evaluations of one or several runs."""
    traces: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        traces += draw_columns(run, {f"{prefix}reward": "reward/mean"}, color=pick_color(i))
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
        color = pick_color(color_index)
        line = make_line(f"{prefix}evaluation, {name}", steps, values, color=color)
        line |= {
            "mode": "lines+markers",
            "error_y": {
                "type": "data", "symmetric": False, "array": errors[1], "arrayminus": errors[0],
                "thickness": 1,
            },
        }  # fmt: skip
        line["line"] = {"color": color, "width": 1.2, "dash": "dashdot" if traces else "dot"}
        traces.append(line)
        if values == run.get_evaluations("eval/pass_at_1")[1]:
            break  # rewards of 0 and 1: both metrics are the same
    return traces


METRIC_CHARTS = {
    "throughput/tokens_per_s": Chart(
        "throughput",
        "Throughput",
        "Trained tokens per second.",
        layout={"yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"}},
    ),
    "rollout/length_mean": Chart(
        "lengths",
        "Length of rollouts",
        "Mean sampled tokens of a rollout.",
        layout={"yaxis": {"title": {"text": "tokens"}, "rangemode": "tozero"}},
    ),
    "policy/entropy": Chart(
        "entropy",
        "Entropy of the policy",
        "A fall to zero means that all rollouts of a group become the same, and nothing is"
        " learned any more.",
        layout={"yaxis": {"title": {"text": "nats per token"}, "rangemode": "tozero"}},
    ),
    "policy/kl_ref": Chart(
        "kl",
        "KL to the reference",
        "Distance of the policy from the reference model.",
        layout={"yaxis": {"title": {"text": "nats per token"}, "rangemode": "tozero"}},
    ),
    "policy/grad_norm": Chart(
        "grad_norm",
        "Gradient norm",
        "Of the policy's updates, before clipping. A jump precedes most collapses.",
        layout={"yaxis": {"rangemode": "tozero"}},
    ),
    "critic/explained_variance": Chart(
        "critic",
        "Explained variance of the critic",
        "1: the values predict the returns. At 0 and below they are no better than a constant.",
    ),
    "filter/share": Chart(
        "filter",
        "Filtered groups",
        "Share of the sampled groups that the filter rejected. Their generation and scoring is"
        " lost.",
        layout={"yaxis": {"tickformat": ".0%", "range": [0, 1]}},
    ),
}
"""Charts with one metric, in which several runs lie over each other."""


def draw_metric(runs: Sequence[RunRecord], metric: str) -> Chart | None:
    """Draw the line of each run that has the metric."""
    traces: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        traces += draw_columns(run, {run.name: metric}, color=pick_color(i))
    chart = METRIC_CHARTS[metric]
    layout = {**chart.layout, "showlegend": len(runs) > 1}
    return replace(chart, traces=traces, layout=layout) if traces else None


def draw_shared_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts in which all runs lie over each other."""
    charts = [draw_reward(runs), *(draw_metric(runs, metric) for metric in METRIC_CHARTS)]
    drawn = [chart for chart in charts if chart is not None]
    return [mark_alarms(chart, runs[0]) for chart in drawn] if len(runs) == 1 else drawn
