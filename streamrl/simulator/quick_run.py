"""A placement played for comparison: no more steps, and no more of its devices, than tell it apart.

Of a run with thousands of groups a step it is enough to play a part: so many of the replicas and of
the ranks, and their part of the groups. Each does what it would do among all of them.
"""

import math
from dataclasses import replace

from streamrl.dataflow import Dataflow
from streamrl.placement.placements import Placement
from streamrl.placement.run_options import Manner
from streamrl.placement.stage_timings import GeneratorTiming, ScoreTiming, Timings
from streamrl.placement.workload import Workload
from streamrl.simulator.results import Simulated
from streamrl.simulator.simulation import simulate

COUNTED = 10
"""Steps, of a placement that generates little ahead."""
ROUNDS = 3
"""Of as many steps as may be under way: one whose rollouts are long holds up all of those, and the
next ones are short. Between one round and part of one there is as much as half of a step's time."""
UNLIKE = 2
"""The first steps are unlike all others, and more where generation is ahead: not counted."""
FEWEST_STEPS = 4
"""Counted, whatever there is in a step, and one round at least."""
GROUPS = 10240
"""So many are counted at least, where that takes no more than all steps."""
PART_GROUPS = 256
"""The fewest of a step in a part that stands for all of it."""
ROLLOUT_S = 40e-6
"""About what each takes to simulate, with all that is done with it, on a core of a server."""
MANY_GROUPS = 5000
"""In a step: with more of them every rollout takes longer, as the root of how many they are."""
CROWDED = 8.0
"""So many times as long where rollouts give up their room for others: two runs took 4 and 12."""
LONGEST = 0.99
"""Of the longest rollout of a step, what the longest of a part has at least."""


def play(
    dataflow: Dataflow,
    placement: Placement,
    timings: Timings,
    workload: Workload,
    *,
    seed: int,
    manner: Manner,
) -> Simulated:
    """What a run would do, by a few steps of it. Raises ConfigError as `simulate` does."""
    lead = manner.lead(placement.max_staleness)
    parts = parts_of(timings, workload, lead)
    part = part_workload(workload, parts)
    found = simulate(
        dataflow,
        placement,
        part_timings(timings, parts),
        part,
        steps=steps_of(part.groups_per_step, lead),
        seed=seed,
        manner=manner,
    )
    counted = len(found.step_ends) - (lead + UNLIKE) - lead
    found = found.without(len(found.step_ends) - lead - manner.whole_turns(counted), lead)
    return replace(found, parts=parts)


def played_groups(timings: Timings, workload: Workload, lead: int) -> int:
    """How many groups are sampled when it is played: what that takes, about."""
    groups = part_workload(workload, parts_of(timings, workload, lead)).groups_per_step
    return round(groups * steps_of(groups, lead) / (1 - workload.filtered))


def played_s(timings: Timings, workload: Workload, lead: int) -> float:
    """About how long it takes to play it."""
    parts = parts_of(timings, workload, lead)
    generator = part_timings(timings, parts).generator
    return simulated_s(part_workload(workload, parts), lead=lead, generator=generator)


def simulated_s(
    workload: Workload,
    *,
    lead: int = 0,
    steps: int | None = None,
    generator: GeneratorTiming | None = None,
) -> float:
    """About how long it takes to simulate so many steps, or those of a comparison.

    At least that, where nothing is said of the generators.
    """
    steps = steps_of(workload.groups_per_step, lead) if steps is None else steps
    slower = math.sqrt(max(1.0, workload.groups_per_step / MANY_GROUPS))
    if generator is not None and _lacks_room(workload, generator):
        slower *= CROWDED
    return steps * workload.rollouts / (1 - workload.filtered) * ROLLOUT_S * slower


def _lacks_room(workload: Workload, generator: GeneratorTiming) -> bool:
    """Whether a replica has places for more rollouts than it has room for, when they are long."""
    running = min(generator.max_running, workload.rollouts / generator.replicas)
    tokens = workload.whole_prompt_tokens + workload.lengths.mean
    return running * tokens > generator.kv_tokens


def steps_of(groups_per_step: int, lead: int) -> int:
    """How many, with those that are not counted; fewer where they are large."""
    under_way = lead + 1
    wanted = max(COUNTED, ROUNDS * under_way)
    enough = max(FEWEST_STEPS, under_way, -(-GROUPS // groups_per_step))
    return lead + UNLIKE + min(wanted, enough) + lead


def parts_of(timings: Timings, workload: Workload, lead: int) -> int:
    """How many parts a run falls into that are alike, and large enough; 1 for all of it.

    On policy filtered groups are replaced one after the other, in the longest of all such chains
    more often than in that of a part: there is no part that stands for all.
    """
    groups, lengths = workload.groups_per_step, workload.lengths
    if timings.cores or (workload.filtered and not lead):
        return 1
    shares = [timing.shares for timing in timings.train.values()]
    divisor = math.gcd(timings.generator.replicas, *shares)
    longest = lengths.expected_longest(workload.rollouts)
    for parts in range(divisor, 1, -1):
        fewer = lengths.expected_longest(workload.rollouts // parts)
        large = groups >= parts * max(PART_GROUPS, workload.mini_batches)
        if not divisor % parts and large and fewer >= LONGEST * longest:
            return parts
    return 1


def part_workload(workload: Workload, parts: int) -> Workload:
    """A part's work of a step."""
    return replace(workload, groups_per_step=-(-workload.groups_per_step // parts))


def part_timings(timings: Timings, parts: int) -> Timings:
    """Of a part of all replicas and ranks."""
    generator = timings.generator
    return replace(
        timings,
        generator=replace(generator, replicas=generator.replicas // parts),
        score={stage: _part_score(timing, parts) for stage, timing in timings.score.items()},
        train={
            r: replace(timing, shares=timing.shares // parts) for r, timing in timings.train.items()
        },
    )


def _part_score(timing: ScoreTiming, parts: int) -> ScoreTiming:
    """Where there are too few replicas to divide, they are slower by as much as they are more."""
    replicas = max(1, timing.replicas // parts)
    return replace(timing.slower(replicas * parts / timing.replicas), replicas=replicas)
