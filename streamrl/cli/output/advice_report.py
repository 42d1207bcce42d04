"""What `streamrl report RUN` prints: what bounds a run, and what would help."""

from collections.abc import Iterable
from typing import Any

from streamrl.calibration.advice import Advice, Option, StageLoad, filter_cost, loads
from streamrl.calibration.prediction import Figures
from streamrl.calibration.run_trace import Machine, Measured

NEXT_TO_NOTHING = 0.25
"""Cores: what a driver and the processes of Ray take."""
ALWAYS = 0.9
"""A stage that is busy for more of the time has next to none to spare."""
ENOUGH = 0.7
"""Groups that are kept for each place of a step, of those admitted at first: more fill it."""


def run_as_json(measured: Measured) -> dict[str, Any]:
    """Return what bounds the run, for scripts."""
    busiest = loads(measured)
    return {
        "steps": len(measured.steps),
        "left_out": dict(measured.left_out),
        "cores": vars(measured.machine),
        "bound_by": busiest[0].stage,
        "stages": {load.stage: {"busy": load.busy, "depth": load.depth} for load in busiest},
        "filter": vars(filter_cost(measured)),
        "measured": vars(Figures.of(measured)),
    }


def advice_as_json(advice: Advice) -> dict[str, Any]:
    """Return what other settings would make of the run, for scripts."""
    return {
        "simulated": vars(advice.simulated),
        "error": advice.error,
        "options": [
            {
                "what": option.what,
                "settings": option.settings,
                "change": option.change,
                "counts": abs(option.change) > advice.least_change,
                **vars(option.figures),
            }
            for option in advice.options
        ],
    }


def describe_run(measured: Measured) -> list[str]:
    """The lines on the run as it was, which take no simulation."""
    busiest = loads(measured)
    out = ", ".join(f"{count} {why}" for why, count in measured.left_out.items() if count)
    return [
        f"{measured.run_dir}: {len(measured.steps)} steps of {measured.mean_step_s:.3g} s,"
        f" staleness {measured.staleness_mean:.2g}" + (f"; left out: {out}" if out else ""),
        f"bound by    {_bound(busiest[0])}",
        *_loads(busiest),
        *_filter(measured),
    ]


def describe_advice(measured: Measured, advice: Advice) -> list[str]:
    """The lines on what other settings would make of it."""
    simulated = advice.simulated
    lines = [
        f"simulated   a step of {simulated.step_s:.3g} s, {advice.error:+.0%}: what follows may be"
        " as far off",
        f"{'instead':<50}{'step':>8}{'change':>8}{'staleness':>11}",
        *_options(advice.options, advice.least_change),
    ]
    machine = measured.machine
    if machine.cores:
        lines.append(
            f"all of it on the {machine.cores} cores that the run was made on{_left(machine)}"
        )
    return lines


def _left(machine: Machine) -> str:
    """What others left of them, if that is less than all."""
    if machine.taken < NEXT_TO_NOTHING:
        return ""
    return f", with the {machine.left:.2g} that other programs left of them"


def _bound(first: StageLoad) -> str:
    depth = "" if first.depth is None else f"; {first.depth:.2g} groups wait for it"
    alone = "" if first.busy > ALWAYS else "; no stage is always busy: they wait for one another"
    return f"{first.stage}, busy {first.busy:.0%} of the time{depth}{alone}"


def _filter(measured: Measured) -> Iterable[str]:
    """What the filter takes and costs; and what may be done about it."""
    cost = filter_cost(measured)
    if not cost.share:
        return
    yield (
        f"filter      takes {cost.share:.0%} of the groups: {cost.generate_s:.3g} s of generation"
        f" and {cost.score_s:.3g} s of scoring in a step of {measured.mean_step_s:.3g} s"
    )
    if cost.oversample * (1 - cost.share) < ENOUGH:
        yield (
            f"            {cost.oversample:.3g} prompts are admitted for each place, and one in"
            f" {1 / (1 - cost.share):.3g} is kept: filter.oversample=auto fills a step in one round"
        )


def _loads(busiest: Iterable[StageLoad]) -> Iterable[str]:
    for load in busiest:
        waiting = "" if load.depth is None else f"  waiting {load.depth:>6.3g} groups"
        yield f"  {load.stage:<14}busy {load.busy:>4.0%}{waiting}"


def _options(options: Iterable[Option], least: float) -> Iterable[str]:
    for option in options:
        note = "" if abs(option.change) > least else "  (too little to tell)"
        yield (
            f"{option.what:<50}{option.figures.step_s:>6.3g} s{option.change:>8.0%}"
            f"{option.figures.staleness_mean:>11.2g}{note}"
        )
        yield f"    {' '.join(option.settings)}"
