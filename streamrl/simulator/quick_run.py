"""A placement played for comparison: no more steps, and no more of its devices, than tell it apart.

Of a run with thousands of groups a step it is enough to play a part: so many of the replicas and of
the ranks, and their part of the groups. Each does what it would do among all of them.
"""

import math
from dataclasses import replace

from streamrl.dataflow import Dataflow
from streamrl.placement.placements import Placement
from streamrl.placement.run_options import RunOptions
from streamrl.placement.stage_timings import GeneratorTiming, ScoreTiming, StageTimings
from streamrl.placement.workload import Workload
from streamrl.simulator.results import SimulationResult
from streamrl.simulator.simulation import run_simulation

MEASURED_STEPS = 10
"""Steps, of a placement that generates little ahead."""
MIN_ROUNDS = 3
"""Of as many steps as may be under way: one whose rollouts are long holds up all of those, and the
next ones are short. Between one round and part of one there is as much as half of a step's time."""
WARM_UP_STEPS = 2
"""The first steps are unlike all others, and more where generation is ahead: not counted."""
MIN_STEPS = 4
"""Counted, whatever there is in a step, and one round at least."""
MIN_GROUPS = 10240
"""So many are counted at least, where that takes no more than all steps."""
MIN_PART_GROUPS = 256
"""The fewest of a step in a part that stands for all of it."""
ROLLOUT_COST_S = 40e-6
"""About what each takes to simulate, with all that is done with it, on a core of a server."""
SLOWDOWN_GROUPS = 5000
"""In a step: with more of them every rollout takes longer, as the root of how many they are."""
PREEMPTION_SLOWDOWN = 8.0
"""So many times as long where rollouts give up their room for others: two runs took 4 and 12."""
MIN_LONGEST_FRACTION = 0.99
"""Of the longest rollout of a step, what the longest of a part has at least."""


def run_quick_simulation(
    dataflow: Dataflow,
    placement: Placement,
    timings: StageTimings,
    workload: Workload,
    *,
    seed: int,
    manner: RunOptions,
) -> SimulationResult:
    """What a run would do, by a few steps of it. Raises ConfigError as `run_simulation` does."""
    lead = manner.max_steps_ahead(placement.max_staleness)
    parts = choose_num_parts(timings, workload, lead)
    part = split_workload(workload, parts)
    found = run_simulation(
        dataflow,
        placement,
        split_timings(timings, parts),
        part,
        steps=choose_num_steps(part.groups_per_step, lead),
        seed=seed,
        manner=manner,
    )
    counted = len(found.step_ends) - (lead + WARM_UP_STEPS) - lead
    found = found.exclude_steps(
        len(found.step_ends) - lead - manner.round_to_publish_every(counted), lead
    )
    return replace(found, num_parts=parts)


def estimate_quick_run_groups(timings: StageTimings, workload: Workload, lead: int) -> int:
    """How many groups are sampled when it is played: what that takes, about."""
    groups = split_workload(workload, choose_num_parts(timings, workload, lead)).groups_per_step
    return round(groups * choose_num_steps(groups, lead) / (1 - workload.filtered_fraction))


def estimate_quick_run_s(timings: StageTimings, workload: Workload, lead: int) -> float:
    """About how long it takes to play it."""
    parts = choose_num_parts(timings, workload, lead)
    generator = split_timings(timings, parts).generator
    return estimate_simulation_s(split_workload(workload, parts), lead=lead, generator=generator)


def estimate_simulation_s(
    workload: Workload,
    *,
    lead: int = 0,
    steps: int | None = None,
    generator: GeneratorTiming | None = None,
) -> float:
    """About how long it takes to simulate so many steps, or those of a comparison.

    At least that, where nothing is said of the generators.
    """
    steps = choose_num_steps(workload.groups_per_step, lead) if steps is None else steps
    slower = math.sqrt(max(1.0, workload.groups_per_step / SLOWDOWN_GROUPS))
    if generator is not None and _exceeds_kv_capacity(workload, generator):
        slower *= PREEMPTION_SLOWDOWN
    return (
        steps * workload.num_rollouts / (1 - workload.filtered_fraction) * ROLLOUT_COST_S * slower
    )


def _exceeds_kv_capacity(workload: Workload, generator: GeneratorTiming) -> bool:
    """Whether a replica has places for more rollouts than it has room for, when they are long."""
    running = min(generator.max_running, workload.num_rollouts / generator.replicas)
    tokens = workload.rounded_prompt_tokens + workload.lengths.mean
    return running * tokens > generator.kv_tokens


def choose_num_steps(groups_per_step: int, lead: int) -> int:
    """How many, with those that are not counted; fewer where they are large."""
    under_way = lead + 1
    wanted = max(MEASURED_STEPS, MIN_ROUNDS * under_way)
    enough = max(MIN_STEPS, under_way, -(-MIN_GROUPS // groups_per_step))
    return lead + WARM_UP_STEPS + min(wanted, enough) + lead


def choose_num_parts(timings: StageTimings, workload: Workload, lead: int) -> int:
    """How many parts a run falls into that are alike, and large enough; 1 for all of it.

    On policy filtered groups are replaced one after the other, in the longest of all such chains
    more often than in that of a part: there is no part that stands for all.
    """
    groups, lengths = workload.groups_per_step, workload.lengths
    if timings.cores or (workload.filtered_fraction and not lead):
        return 1
    shares = [timing.dp_size for timing in timings.train.values()]
    divisor = math.gcd(timings.generator.replicas, *shares)
    longest = lengths.expected_longest(workload.num_rollouts)
    for parts in range(divisor, 1, -1):
        fewer = lengths.expected_longest(workload.num_rollouts // parts)
        large = groups >= parts * max(MIN_PART_GROUPS, workload.mini_batches)
        if not divisor % parts and large and fewer >= MIN_LONGEST_FRACTION * longest:
            return parts
    return 1


def split_workload(workload: Workload, parts: int) -> Workload:
    """A part's work of a step."""
    return replace(workload, groups_per_step=-(-workload.groups_per_step // parts))


def split_timings(timings: StageTimings, parts: int) -> StageTimings:
    """Of a part of all replicas and ranks."""
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
    """Where there are too few replicas to divide, they are slower by as much as they are more."""
    replicas = max(1, timing.replicas // parts)
    return replace(timing.scale_duration(replicas * parts / timing.replicas), replicas=replicas)
