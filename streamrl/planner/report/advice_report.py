"""Text and JSON of `streamrl report RUN`: the bottleneck, and the effect of other settings."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.planner.calibration.advice import (
    SettingsAdvice,
    SettingsOption,
    StageLoad,
    measure_episodes,
    measure_filter_cost,
    measure_stage_loads,
)
from streamrl.planner.calibration.prediction import SteadyMetrics
from streamrl.planner.calibration.run_trace import RunTrace, load_run_trace

REFRESH_FACTOR = 1.2
SATURATED_BUSY = 0.9
"""Busy fraction above which a stage has no reserve."""
SUFFICIENT_OVERSAMPLING = 0.7
"""Kept groups per group that a step trains, from which oversampling suffices."""


def report_to_json(trace: RunTrace) -> dict[str, Any]:
    """Return the JSON of `streamrl report`: stage loads, filter cost and step metrics of a run."""
    loads, episodes = measure_stage_loads(trace), measure_episodes(trace)
    return {
        "steps": len(trace.steps),
        "left_out": dict(trace.excluded_steps),
        "bound_by": loads[0].stage,
        "stages": {
            load.stage: {"busy": load.busy_fraction, "depth": load.mean_depth} for load in loads
        },
        "filter": vars(measure_filter_cost(trace)),
        "episodes": episodes and vars(episodes),
        "measured": vars(SteadyMetrics.from_run(trace)),
    }


def advice_to_json(advice: SettingsAdvice) -> dict[str, Any]:
    return {
        "simulated": vars(advice.simulated_metrics),
        "error": advice.simulation_error,
        "options": [
            {
                "what": option.description,
                "settings": option.settings,
                "change": option.step_s_change,
                "counts": abs(option.step_s_change) > advice.min_change,
                **vars(option.metrics),
            }
            for option in advice.options
        ],
    }


def describe_run(trace: RunTrace) -> list[str]:
    """Format the measurements of a run: bottleneck, load of each stage, cost of its filter."""
    loads = measure_stage_loads(trace)
    return [
        f"{trace.run_dir}: {len(trace.steps)} steps of {trace.mean_step_s:.3g} s,"
        f" staleness {trace.staleness_mean:.2g}{describe_excluded_steps(trace)}",
        f"bound by    {_describe_bottleneck(loads[0])}",
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


def describe_advice(trace: RunTrace, advice: SettingsAdvice) -> list[str]:
    """Format a table of other settings, with the simulated step time and staleness of each."""
    simulated = advice.simulated_metrics
    lines = [
        f"simulated   a step of {simulated.step_s:.3g} s,"
        f" {advice.simulation_error:+.0%}; the rows below may have the same error",
        f"{'instead':<50}{'step':>8}{'change':>8}{'staleness':>11}",
        *_describe_options(advice.options, advice.min_change),
    ]
    if trace.cores:
        lines.append(
            f"simulated with a core for every process; those of the run share {trace.cores} cores"
        )
    return lines


def _describe_bottleneck(load: StageLoad) -> str:
    depth = "" if load.mean_depth is None else f"; {load.mean_depth:.2g} groups wait for it"
    note = "" if load.busy_fraction > SATURATED_BUSY else "; no stage is saturated"
    return f"{load.stage}, busy {load.busy_fraction:.0%} of the time{depth}{note}"


def _describe_filter(trace: RunTrace) -> Iterable[str]:
    cost = measure_filter_cost(trace)
    if not cost.share:
        return
    yield (
        f"filter      rejects {cost.share:.0%} of the groups: {cost.generate_s:.3g} s of generation"
        f" and {cost.score_s:.3g} s of scoring in a step of {trace.mean_step_s:.3g} s"
    )
    if cost.oversample * (1 - cost.share) < SUFFICIENT_OVERSAMPLING:
        yield (
            f"            {cost.oversample:.3g} prompts are admitted per trained group, and one"
            f" in {1 / (1 - cost.share):.3g} is kept: filter.oversample=auto fills a step in one"
            " round"
        )


def _describe_stale(trace: RunTrace) -> Iterable[str]:
    rows = [step.row for step in trace.steps if step.row.get("stale/share")]
    ratios = [row["stale/length_ratio"] for row in rows if row.get("stale/length_ratio")]
    if not rows:
        return
    share = sum(row["stale/share"] for row in rows) / len(trace.steps)
    length = f"rollouts {statistics.fmean(ratios):.2g} times as long" if ratios else "no lengths"
    yield (
        f"stale       {share:.0%} of the groups are dropped, with {length} as the trained ones;"
        f" {sum(row['stale/lost_prompts'] for row in rows):.0f} prompts for good"
    )


def _describe_episodes(trace: RunTrace) -> Iterable[str]:
    load = measure_episodes(trace)
    if load is None:
        return
    yield (
        f"episodes    {load.turns:.3g} turns, {load.calls:.3g} calls, {load.sampled_tokens:.3g}"
        f" sampled tokens; of their time {load.decode_frac:.0%} sampling, {load.wait_frac:.0%}"
        f" waiting for a slot or the devices, {load.environment_frac:.0%} waiting for their"
        f" environment ({load.environment_s:.3g} s)"
    )
    if load.has_too_few_open:
        slots = trace.config.generator.max_concurrent_rollouts
        yield (
            f"            at most {load.max_open} are open per generator:"
            f" environment.open_episodes={load.needed_open} keep more of its {slots} decode slots"
            " busy"
        )


def _describe_loads(loads: Iterable[StageLoad]) -> Iterable[str]:
    for load in loads:
        waiting = "" if load.mean_depth is None else f"  waiting {load.mean_depth:>6.3g} groups"
        yield f"  {load.stage:<14}busy {load.busy_fraction:>4.0%}{waiting}"


def _describe_options(options: Iterable[SettingsOption], min_change: float) -> Iterable[str]:
    """Yield two lines per option; changes up to `min_change` are marked as noise."""
    for option in options:
        note = "" if abs(option.step_s_change) > min_change else "  (within noise)"
        yield (
            f"{option.description:<50}{option.metrics.step_s:>6.3g} s{option.step_s_change:>8.0%}"
            f"{option.metrics.staleness_mean:>11.2g}{note}"
        )
        yield f"    {' '.join(option.settings)}"
