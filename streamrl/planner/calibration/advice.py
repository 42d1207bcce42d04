"""Advice on a run: its bottleneck, and what its filter, episodes and stale groups cost."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.planner.calibration.prediction import (
    SteadyMetrics,
    count_generators,
)
from streamrl.planner.calibration.run_trace import RunTrace, load_run_trace


def average_metric(trace: RunTrace, name: str, default: float | None = None) -> float | None:
    """Return the mean of a metric over the steps that log it; `default` if none does."""
    values = [step.row[name] for step in trace.steps if step.row.get(name) is not None]
    return statistics.fmean(values) if values else default


def measure_stage_loads(trace: RunTrace) -> dict[str, dict[str, float | None]]:
    """Return the load of each stage, busiest first.

    busy: busy fraction of its processes' time. depth: mean number of waiting groups, None if the
    run logs none.
    """
    busy = {stage: 1 - idle for stage, idle in trace.idle_fractions.items()}
    return {
        stage: {"busy": busy[stage], "depth": average_metric(trace, f"queue/depth/{stage}")}
        for stage in sorted(busy, key=lambda stage: -busy[stage])
    }


def measure_filter_cost(trace: RunTrace) -> dict[str, float]:
    """Return the cost of the group filter.

    share: rejected groups as a fraction of rejected and trained groups. generate_s, score_s:
    seconds per step spent on sampling and scoring them. oversample: prompts admitted per group of a
    step.
    """
    cost = {"share": trace.filtered_fraction}
    for name, default in (("generate_s", 0.0), ("score_s", 0.0), ("oversample", 1.0)):
        cost[name] = average_metric(trace, f"filter/{name}", default) or 0.0
    return cost


def measure_episodes(trace: RunTrace) -> dict[str, float] | None:
    """Return the load of a run's episodes, means over its steps; None if none sampled.

    decode_frac, wait_frac, environment_frac: shares of an episode's time in the engine, waiting for
    a slot or the devices, and in its environment. max_open: most open episodes of a generator.
    needed_open: open episodes that keep its decode slots busy: by Little's law slots * (1 +
    environment time / decode time), but no more than it has of the steps in flight.
    """
    config = trace.config
    if not config.environment.is_enabled or not average_metric(trace, "episode/decode_frac"):
        return None
    names = "turns calls sampled_tokens environment_s decode_frac wait_frac environment_frac"
    load = {name: average_metric(trace, f"episode/{name}") or 0.0 for name in names.split()}
    groups = (config.pipeline.max_steps_ahead + 1) * config.pipeline.groups_per_step
    in_flight = groups * config.algorithm.group_size / count_generators(config)
    slots = config.generator.max_concurrent_rollouts
    wanted = slots * (1 + load["environment_frac"] / load["decode_frac"])
    load |= {"max_open": config.max_open_rollouts, "needed_open": math.ceil(min(wanted, in_flight))}
    return load


REFRESH_FACTOR = 1.2
SATURATED_BUSY = 0.9
"""Busy fraction above which a stage has no reserve."""
SUFFICIENT_OVERSAMPLING = 0.7
"""Kept groups per group that a step trains, from which oversampling suffices."""


def report_to_json(trace: RunTrace) -> dict[str, Any]:
    """Return the JSON of `streamrl report`: stage loads, filter cost and step metrics of a run."""
    loads = measure_stage_loads(trace)
    return {
        "steps": len(trace.steps),
        "left_out": dict(trace.excluded_steps),
        "bound_by": next(iter(loads)),
        "stages": loads,
        "filter": measure_filter_cost(trace),
        "episodes": measure_episodes(trace),
        "measured": vars(SteadyMetrics.from_run(trace)),
    }


def describe_run(trace: RunTrace) -> list[str]:
    """Format the measurements of a run: bottleneck, load of each stage, cost of its filter."""
    loads = measure_stage_loads(trace)
    stage, load = next(iter(loads.items()))
    depth = "" if load["depth"] is None else f"; {load['depth']:.2g} groups wait for it"
    note = "" if (load["busy"] or 0.0) > SATURATED_BUSY else "; no stage is saturated"
    return [
        f"{trace.run_dir}: {len(trace.steps)} steps of {trace.mean_step_s:.3g} s,"
        f" staleness {trace.staleness_mean:.2g}{describe_excluded_steps(trace)}",
        f"bound by    {stage}, busy {load['busy']:.0%} of the time{depth}{note}",
        *_describe_loads(loads),
        *_describe_episodes(trace),
        *_describe_filter(trace),
        *_describe_stale(trace),
    ]


class BottleneckText:
    """Function of a run directory and its steps: the lines of `describe_run`, or why none.

    Reading the trace of a long run takes seconds, so the text is kept until the run has
    REFRESH_FACTOR times as many steps.
    """

    def __init__(self) -> None:
        self._texts: dict[Path, tuple[int, Sequence[str]]] = {}

    def __call__(self, run_dir: Path, num_steps: int) -> Sequence[str]:
        known_steps, lines = self._texts.get(run_dir, (0, ()))
        if not lines or num_steps > REFRESH_FACTOR * known_steps:
            try:
                lines = describe_run(load_run_trace(run_dir))
            except ConfigError as error:
                lines = [str(error)]
            self._texts[run_dir] = num_steps, lines
        return lines


def describe_excluded_steps(trace: RunTrace) -> str:
    """Return a clause that counts the steps left out, by reason; "" without such steps."""
    excluded = ", ".join(f"{count} {why}" for why, count in trace.excluded_steps.items() if count)
    return f"; left out: {excluded}" if excluded else ""


def _describe_filter(trace: RunTrace) -> Iterable[str]:
    cost = measure_filter_cost(trace)
    if not cost["share"]:
        return
    yield (
        f"filter      rejects {cost['share']:.0%} of the groups: {cost['generate_s']:.3g} s of"
        f" generation and {cost['score_s']:.3g} s of scoring in a step of {trace.mean_step_s:.3g} s"
    )
    kept = 1 - cost["share"]
    if cost["oversample"] * kept < SUFFICIENT_OVERSAMPLING:
        yield (
            f"            {cost['oversample']:.3g} prompts are admitted per trained group, and one"
            f" in {1 / kept:.3g} is kept: filter.oversample=auto fills a step in one round"
        )


def _describe_stale(trace: RunTrace) -> Iterable[str]:
    rows = [step.row for step in trace.steps if step.row.get("stale/share")]
    ratios = [row["stale/length_ratio"] for row in rows if row.get("stale/length_ratio")]
    if not rows:
        return
    share = sum(row["stale/share"] for row in rows) / len(trace.steps)
    longer = f", {statistics.fmean(ratios):.2g} times as long as the trained ones" if ratios else ""
    yield (
        f"stale       {share:.0%} of the groups are dropped{longer};"
        f" {sum(row['stale/lost_prompts'] for row in rows):.0f} prompts for good"
    )


def _describe_episodes(trace: RunTrace) -> Iterable[str]:
    load = measure_episodes(trace)
    if load is None:
        return
    yield (
        f"episodes    {load['turns']:.3g} turns, {load['calls']:.3g} calls,"
        f" {load['sampled_tokens']:.3g} sampled tokens; of their time {load['decode_frac']:.0%}"
        f" sampling, {load['wait_frac']:.0%} waiting for a slot or the devices,"
        f" {load['environment_frac']:.0%} waiting for their environment"
        f" ({load['environment_s']:.3g} s)"
    )
    if load["max_open"] < load["needed_open"]:
        slots = trace.config.generator.max_concurrent_rollouts
        yield (
            f"            at most {load['max_open']} are open per generator:"
            f" environment.open_episodes={load['needed_open']} keep more of its {slots} decode"
            " slots busy"
        )


def _describe_loads(loads: Mapping[str, Mapping[str, float | None]]) -> Iterable[str]:
    for stage, load in loads.items():
        waiting = "" if load["depth"] is None else f"  waiting {load['depth']:>6.3g} groups"
        yield f"  {stage:<14}busy {load['busy']:>4.0%}{waiting}"
