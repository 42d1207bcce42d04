"""Quick simulations for comparing placements: few steps, and a fraction of the devices.

A run with thousands of groups per step is simulated by a representative part: a fraction of the
replicas and data-parallel ranks with the same fraction of the groups. Each process then has the
same work as in the full run.
"""

import math
from dataclasses import replace

from streamrl.dataflow import Dataflow
from streamrl.placement.placements import Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import ScoreTiming, StageTimings
from streamrl.planner.problem.workload import Workload
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulation import run_simulation

MEASURED_STEPS = 6
"""Number of steps to average over, where a placement generates few steps ahead."""
MIN_ROUNDS = 2
"""Minimum number of cycles of `lead + 1` steps to average over; `lead` is the steps in flight.

A long rollout delays every step in flight, and the steps after that are short; so average over
whole cycles. A partial cycle can shift the mean by half a step.
"""
WARM_UP_STEPS = 2
"""Steps excluded from the means, besides the `lead` steps that fill the stream."""
MIN_STEPS = 4
"""Minimum number of steps to average over, whatever their size; at least one whole cycle."""
MIN_ROLLOUTS = 10240
"""Minimum number of rollouts to average over, unless MEASURED_STEPS is reached first."""
MIN_PART_GROUPS = 128
"""Smallest number of groups per step for which a part represents the whole run."""
MIN_UPDATE_ROLLOUTS = 32
"""Smallest number of rollouts per update of a part: with 16, eight updates were 12 % too short."""
GROUP_STAGE_COST_S, ROLLOUT_COST_S = 40e-6, 10e-6
"""Measured on a server core: time to simulate a group in one stage, and a rollout."""
SLOWDOWN_GROUPS = 5000
"""With more groups per step, simulating a rollout costs more: by the square root of groups."""
MIN_LONGEST_FRACTION = 0.99
"""Minimum ratio of a part's expected longest rollout to that of the whole run."""


def run_quick_simulation(
    dataflow: Dataflow,
    placement: Placement,
    timings: StageTimings,
    workload: Workload,
    *,
    seed: int,
    run_options: RunOptions,
) -> SimulationResult:
    """Simulate a few steps of a run, on a representative part of its devices where possible.

    Raises ConfigError as `run_simulation` does.
    """
    lead = run_options.get_max_steps_ahead(placement.max_staleness)
    parts = choose_num_parts(timings, workload, lead)
    part_workload = split_workload(workload, parts)
    result = run_simulation(
        dataflow,
        placement,
        split_timings(timings, parts),
        part_workload,
        steps=choose_num_steps(part_workload, lead),
        seed=seed,
        run_options=run_options,
    )
    counted_steps = len(result.step_ends) - (lead + WARM_UP_STEPS) - lead
    result = result.exclude_steps(
        len(result.step_ends) - lead - run_options.round_to_publish_every(counted_steps), lead
    )
    return replace(result, num_parts=parts)


def estimate_quick_run_s(timings: StageTimings, workload: Workload, lead: int) -> float:
    """Estimate the CPU seconds that `run_quick_simulation` takes.

    lead: steps that generation runs ahead.
    """
    part = split_workload(workload, choose_num_parts(timings, workload, lead))
    stages = 1 + len(timings.score) + len(timings.train)
    return estimate_simulation_s(part, stages, steps=choose_num_steps(part, lead))


def estimate_simulation_s(workload: Workload, stages: int, *, steps: int) -> float:
    """Estimate the CPU seconds to simulate `steps` steps of a dataflow with `stages` stages.

    The estimate ignores preemption of rollouts and of devices, with which a simulation takes two
    to three times as long.
    """
    groups = workload.groups_per_step / (1 - workload.filtered_fraction)
    group_s = stages * GROUP_STAGE_COST_S + workload.group_size * ROLLOUT_COST_S
    return steps * groups * group_s * math.sqrt(max(1.0, groups / SLOWDOWN_GROUPS))


def choose_num_steps(workload: Workload, lead: int) -> int:
    """Return how many steps a quick simulation runs, including steps excluded from the means.

    Fewer steps suffice where steps have many rollouts. lead: steps that generation runs ahead.
    """
    steps_in_flight = lead + 1
    max_counted = max(MEASURED_STEPS, MIN_ROUNDS * steps_in_flight)
    min_counted = max(MIN_STEPS, steps_in_flight, -(-MIN_ROLLOUTS // workload.num_rollouts))
    return lead + WARM_UP_STEPS + min(max_counted, min_counted) + lead


def choose_num_parts(timings: StageTimings, workload: Workload, lead: int) -> int:
    """Return into how many equal, representative parts a run can be split; 1 if it cannot.

    On policy with a group filter, each filtered group is replaced in turn, and the step waits for
    the longest chain of replacements. The longest of all chains exceeds the longest of a part, so
    no part represents such a run.
    """
    lengths, min_update_groups = workload.lengths, MIN_UPDATE_ROLLOUTS / workload.group_size
    min_part_groups = max(MIN_PART_GROUPS, min_update_groups * workload.mini_batches)
    if workload.filtered_fraction and not lead:
        return 1
    dp_sizes = [timing.dp_size for timing in timings.train.values()]
    divisor = math.gcd(timings.generator.replicas, *dp_sizes)
    longest = lengths.expected_longest(workload.num_rollouts)
    for parts in range(divisor, 1, -1):
        part_longest = lengths.expected_longest(workload.num_rollouts // parts)
        is_large = workload.groups_per_step >= parts * min_part_groups
        if not divisor % parts and is_large and part_longest >= MIN_LONGEST_FRACTION * longest:
            return parts
    return 1


def split_workload(workload: Workload, parts: int) -> Workload:
    return replace(workload, groups_per_step=-(-workload.groups_per_step // parts))


def split_timings(timings: StageTimings, parts: int) -> StageTimings:
    generator = timings.generator
    return replace(
        timings,
        generator=replace(generator, replicas=generator.replicas // parts),
        score={
            stage: _split_score_timing(timing, parts) for stage, timing in timings.score.items()
        },
        train={
            r: replace(timing, dp_size=timing.dp_size // parts)
            for r, timing in timings.train.items()
        },
    )


def _split_score_timing(timing: ScoreTiming, parts: int) -> ScoreTiming:
    """Divide the replicas; if they do not divide evenly, make each proportionally slower."""
    replicas = max(1, timing.replicas // parts)
    times = replicas * parts / timing.replicas
    return replace(
        timing,
        replicas=replicas,
        batch_s=timing.batch_s * times,
        rollout_s=timing.rollout_s * times,
        token_s=timing.token_s * times,
    )
