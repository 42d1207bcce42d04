"""What `streamrl report RUN` prints: what bounds a run, and what would help."""

from collections.abc import Iterable
from typing import Any

from streamrl.calibration.advice import (
    SettingsAdvice,
    SettingsOption,
    StageLoad,
    measure_filter_cost,
    measure_stage_loads,
)
from streamrl.calibration.prediction import SteadyMetrics
from streamrl.calibration.run_trace import MachineCores, RunTrace

NEGLIGIBLE_CORES = 0.25
"""Cores: what a driver and the processes of Ray take."""
SATURATED_BUSY = 0.9
"""A stage that is busy for more of the time has next to none to spare."""
SUFFICIENT_OVERSAMPLING = 0.7
"""Groups that are kept for each place of a step, of those admitted at first: more fill it."""


def run_to_json(measured: RunTrace) -> dict[str, Any]:
    """Return what bounds the run, for scripts."""
    busiest = measure_stage_loads(measured)
    return {
        "steps": len(measured.steps),
        "left_out": dict(measured.excluded_steps),
        "cores": vars(measured.machine),
        "bound_by": busiest[0].stage,
        "stages": {
            load.stage: {"busy": load.busy_fraction, "depth": load.mean_depth} for load in busiest
        },
        "filter": vars(measure_filter_cost(measured)),
        "measured": vars(SteadyMetrics.from_trace(measured)),
    }


def advice_to_json(advice: SettingsAdvice) -> dict[str, Any]:
    """Return what other settings would make of the run, for scripts."""
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


def describe_run(measured: RunTrace) -> list[str]:
    """The lines on the run as it was, which take no simulation."""
    busiest = measure_stage_loads(measured)
    out = ", ".join(f"{count} {why}" for why, count in measured.excluded_steps.items() if count)
    return [
        f"{measured.run_dir}: {len(measured.steps)} steps of {measured.mean_step_s:.3g} s,"
        f" staleness {measured.staleness_mean:.2g}" + (f"; left out: {out}" if out else ""),
        f"bound by    {_describe_bottleneck(busiest[0])}",
        *_describe_loads(busiest),
        *_describe_filter(measured),
    ]


def describe_advice(measured: RunTrace, advice: SettingsAdvice) -> list[str]:
    """The lines on what other settings would make of it."""
    simulated = advice.simulated_metrics
    lines = [
        f"simulated   a step of {simulated.step_s:.3g} s,"
        f" {advice.simulation_error:+.0%}: what follows may be"
        " as far off",
        f"{'instead':<50}{'step':>8}{'change':>8}{'staleness':>11}",
        *_describe_options(advice.options, advice.min_change),
    ]
    machine = measured.machine
    if machine.cores:
        lines.append(
            f"all of it on the {machine.cores} cores that the run was made"
            f" on{_describe_cores_left(machine)}"
        )
    return lines


def _describe_cores_left(machine: MachineCores) -> str:
    """What others left of them, if that is less than all."""
    if machine.taken < NEGLIGIBLE_CORES:
        return ""
    return f", with the {machine.available_cores:.2g} that other programs left of them"


def _describe_bottleneck(first: StageLoad) -> str:
    depth = "" if first.mean_depth is None else f"; {first.mean_depth:.2g} groups wait for it"
    alone = (
        ""
        if first.busy_fraction > SATURATED_BUSY
        else "; no stage is always busy: they wait for one another"
    )
    return f"{first.stage}, busy {first.busy_fraction:.0%} of the time{depth}{alone}"


def _describe_filter(measured: RunTrace) -> Iterable[str]:
    """What the filter takes and costs; and what may be done about it."""
    cost = measure_filter_cost(measured)
    if not cost.share:
        return
    yield (
        f"filter      takes {cost.share:.0%} of the groups: {cost.generate_s:.3g} s of generation"
        f" and {cost.score_s:.3g} s of scoring in a step of {measured.mean_step_s:.3g} s"
    )
    if cost.oversample * (1 - cost.share) < SUFFICIENT_OVERSAMPLING:
        yield (
            f"            {cost.oversample:.3g} prompts are admitted for each place, and one in"
            f" {1 / (1 - cost.share):.3g} is kept: filter.oversample=auto fills a step in one round"
        )


def _describe_loads(busiest: Iterable[StageLoad]) -> Iterable[str]:
    for load in busiest:
        waiting = "" if load.mean_depth is None else f"  waiting {load.mean_depth:>6.3g} groups"
        yield f"  {load.stage:<14}busy {load.busy_fraction:>4.0%}{waiting}"


def _describe_options(options: Iterable[SettingsOption], least: float) -> Iterable[str]:
    for option in options:
        note = "" if abs(option.step_s_change) > least else "  (too little to tell)"
        yield (
            f"{option.description:<50}{option.metrics.step_s:>6.3g} s{option.step_s_change:>8.0%}"
            f"{option.metrics.staleness_mean:>11.2g}{note}"
        )
        yield f"    {' '.join(option.settings)}"
