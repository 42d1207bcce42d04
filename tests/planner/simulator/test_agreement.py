"""Agreement of simulated steps with the real loops, with engines of equal speed."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from streamrl.buffer.micro_batch_schedule import UpdatePlan
from streamrl.placement.placements import Placement
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.simulator.simulation import run_simulation
from tests.fake_stream import GROUPS_AT_ONCE
from tests.fakes import Plan
from tests.planner.notations import make_assignment
from tests.planner.simulator.real_loops import BATCH, PROMPT_TOKENS, AgreementCase, run_real

GROUP_SIZE = 2
TIMINGS = StageTimings(
    generator=GeneratorTiming(
        replicas=2,
        max_running=GROUPS_AT_ONCE * GROUP_SIZE,
        kv_tokens=400,
        weights_s=0.1,
        kv_token_s=0.001,
        compute_rollout_s=0.02,
        step_s=0.01,
        rollout_s=0.002,
        prefill_token_s=0.005,
        begin_s=0.004,
    ),
    score={
        "reward": ScoreTiming(1, BATCH, batch_s=0.1, rollout_s=0.05, token_s=0.001),
        "reference": ScoreTiming(1, BATCH, batch_s=0.2, rollout_s=0.0, token_s=0.003),
        "value": ScoreTiming(1, BATCH, batch_s=0.2, rollout_s=0.0, token_s=0.002),
    },
    train={
        "policy": TrainTiming(2, micro_batch_s=0.2, token_s=0.004, update_s=0.5),
        "critic": TrainTiming(1, micro_batch_s=0.1, token_s=0.003, update_s=0.3),
    },
    weights={"generate": WeightsTiming(publish_s=0.4, pull_s=0.25, pause_s=0.25)},
    hop_s=0.008,
    step_s=0.004,
)
WORKLOAD = Workload(8, GROUP_SIZE, PROMPT_TOKENS, LognormalLengths(20, 0.6, 60), 1, 1, 150)
PLAN = Plan(
    steps=8, groups_per_step=8, group_size=GROUP_SIZE, shards=1, micro_batch_tokens=150, scorers=1
)


def make_placement(staleness: int, **first_devices: int) -> Placement:
    """Place every call on two devices from the given first device."""
    calls = {stage: make_assignment("1-1-2", at) for stage, at in first_devices.items()}
    return Placement(calls, max_staleness=staleness)


APART = {"generate": 0, "reference": 2, "value": 4, "train": 6, "train_critic": 8}
TOGETHER = dict.fromkeys(APART, 0)
SPLIT = {"generate": 0, "reference": 2, "value": 2, "train": 0, "train_critic": 2}


def make_case(staleness: int, first_devices: dict[str, int], **plan: Any) -> AgreementCase:
    plan_of_case = replace(PLAN, max_staleness=staleness, **plan)
    stages = [
        call.stage
        for call in AgreementCase(plan_of_case, Placement({}), TIMINGS, WORKLOAD).dataflow.calls
    ]
    chosen = {stage: at for stage, at in first_devices.items() if stage in stages}
    return AgreementCase(plan_of_case, make_placement(staleness, **chosen), TIMINGS, WORKLOAD)


def make_crowded_case(group_size: int, max_running: int) -> AgreementCase:
    """Return a case with uneven lengths and few slots per generator."""
    base_case = make_case(2, APART, group_size=group_size, slots=max_running)
    return replace(
        base_case,
        timings=replace(TIMINGS, generator=replace(TIMINGS.generator, max_running=max_running)),
        workload=replace(WORKLOAD, group_size=group_size, micro_batch_tokens=400),
        plan=replace(base_case.plan, micro_batch_tokens=400),
    )


CASES = {
    "on policy": make_case(0, APART),
    "one step ahead": make_case(1, APART),
    "two steps ahead": make_case(2, APART),
    "groups of five": make_crowded_case(5, 8),
    "fewer slots than rollouts in a group": make_crowded_case(5, 3),
    "with a reference": make_case(1, APART, reference=True),
    "two models trained": make_case(1, APART, critic=True),
    "one after the other": make_case(0, TOGETHER),
    "one after the other, a reference": make_case(0, TOGETHER, reference=True),
    "in turn and ahead": make_case(1, TOGETHER),
    "split": make_case(1, SPLIT, reference=True),
    "several updates": replace(
        make_case(1, APART),
        pace=UpdatePlan(True, 2, 2),
        workload=replace(WORKLOAD, epochs=2, mini_batches=2),
    ),
    "whole steps": replace(
        make_case(0, APART, reference=True), pace=UpdatePlan(requires_full_step=True)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_simulated_step_ends_match_the_real_loops(name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    simulated = run_simulation(
        case.dataflow,
        case.placement,
        case.timings,
        replace(case.workload, requires_whole_step=case.pace.requires_full_step),
        steps=case.plan.steps,
        seed=case.seed,
    )
    real = run_real(case, monkeypatch)
    assert simulated.step_ends == pytest.approx(real.step_ends, rel=0.015)
    ages: Counter[int] = Counter()
    for outcome in real.outcomes:
        for group in outcome.groups:
            for version, tokens in group.info.version_tokens:
                ages[outcome.version - version] += tokens
    mean = sum(age * tokens for age, tokens in ages.items()) / ages.total()
    assert simulated.exclude_steps(0).tokens_by_staleness.total() == ages.total()
    assert simulated.exclude_steps(0).staleness_mean == pytest.approx(mean, abs=0.02)
