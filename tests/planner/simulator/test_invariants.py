"""Invariants of every simulation."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.placements import Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulated_prompts import CompletionLengths
from streamrl.planner.simulator.simulation import run_simulation
from tests.planner.simulator.test_simulation import on

STAGES = ("generate", "greedy", "reference", "value", "train", "train_critic")
SCORED = ("reward", "reference", "value", "baseline")
COLUMNS = ("ref_logprobs", "values", "baseline_scores")


@dataclass(frozen=True)
class SimulationCase:
    """Parameters of a random simulation."""

    columns: tuple[str, ...]
    devices: tuple[int, ...]
    staleness: int
    workload: Workload
    timings: StageTimings
    run_options: RunOptions

    def run(self) -> SimulationResult:
        flow = build_dataflow((*ROLLOUT_COLUMNS, "scores", *self.columns))
        stages = {call.stage for call in flow.calls}
        first_devices = dict(zip(STAGES, self.devices, strict=True))
        # Both generator stages use the same devices.
        first_devices["greedy"] = first_devices["generate"]
        calls = {stage: on(at) for stage, at in first_devices.items() if stage in stages}
        placement = Placement(calls, self.staleness)
        return run_simulation(
            flow,
            placement,
            self.timings,
            self.workload,
            steps=4,
            seed=3,
            run_options=self.run_options,
        )


seconds = st.sampled_from([0.0, 0.3, 1.1])
workloads = st.builds(
    Workload,
    groups_per_step=st.integers(1, 5),
    group_size=st.integers(1, 3),
    prompt_tokens=st.just(3),
    lengths=st.builds(LognormalLengths, st.just(8.0), st.sampled_from([0.2, 1.0]), st.just(30)),
    epochs=st.integers(1, 2),
    mini_batches=st.integers(1, 2),
    micro_batch_tokens=st.sampled_from([33, 80]),
    requires_whole_step=st.booleans(),
)
generators = st.builds(
    GeneratorTiming,
    replicas=st.integers(1, 3),
    max_running=st.integers(1, 6),
    kv_tokens=st.sampled_from([40, 1000]),
    weights_s=st.just(0.05),
    kv_token_s=st.sampled_from([0.0, 0.001]),
    compute_rollout_s=st.just(0.01),
    step_s=st.just(0.01),
    rollout_s=st.just(0.001),
    prefill_token_s=st.sampled_from([0.0, 0.01]),
    begin_s=st.sampled_from([0.0, 0.1]),
)
scores = st.builds(
    ScoreTiming, st.integers(1, 2), st.integers(1, 3), seconds, seconds, st.just(0.001)
)
trains = st.builds(TrainTiming, st.integers(1, 2), seconds, st.just(0.002), seconds, seconds)
weights = st.builds(WeightsTiming, seconds, st.just(0.5), st.sampled_from([0.0, 0.5]))
timings = st.builds(
    StageTimings,
    generator=generators,
    score=st.fixed_dictionaries(dict.fromkeys(SCORED, scores)),
    train=st.fixed_dictionaries({"policy": trains, "critic": trains}),
    weights=st.fixed_dictionaries({"generate": weights, "value": weights}),
    hop_s=st.sampled_from([0.0, 0.01]),
    step_s=st.sampled_from([0.0, 0.1]),
)
cases = st.builds(
    SimulationCase,
    columns=st.lists(st.sampled_from(COLUMNS), unique=True).map(tuple),
    devices=st.tuples(*[st.integers(0, 2)] * len(STAGES)),
    staleness=st.integers(0, 3),
    workload=workloads,
    timings=timings,
    run_options=st.builds(RunOptions, slice_s=st.sampled_from([0.1, 1.0])),
)


def check_ledger(case: SimulationCase, result: SimulationResult) -> None:
    groups = 4 * case.workload.groups_per_step
    assert result.ledger.admitted == result.ledger.trained == groups
    assert result.ledger.in_flight == 0
    trained = Counter(group.uid for outcome in result.outcomes for group in outcome.groups)
    assert len(trained) == groups
    assert set(trained.values()) == {1}
    completions = CompletionLengths(case.workload, 3)
    assert result.exclude_steps(0).tokens_by_staleness.total() == sum(
        sum(completions.get_lengths(uid)) for uid in trained
    )
    assert result.exclude_steps(0).staleness_max <= case.staleness
    assert list(result.step_ends) == sorted(result.step_ends)
    assert [outcome.version for outcome in result.outcomes] == [0, 1, 2, 3]


def check_devices(case: SimulationCase, result: SimulationResult) -> None:
    """Assert that phases never overlap on a device; all trained models are one phase."""
    trained = result.dataflow.trained_roles
    first_devices = dict(zip(STAGES, case.devices, strict=True))
    spans_by_device = defaultdict(list)
    for call in result.dataflow.calls:
        phase = "trainer" if call.role in trained else call.role
        for name in result.process_names[call.role]:
            for span in result.recorders[name].list_spans() if name in result.recorders else ():
                if span.name == call.stage and call.stage in first_devices:
                    stage = "generate" if call.stage == "greedy" else call.stage
                    spans_by_device[first_devices[stage]].append((span.start_s, span.end_s, phase))
    for spans in spans_by_device.values():
        phase_ends: dict[str, float] = {}
        for start, end, phase in sorted(spans):
            assert all(
                until <= start + 1e-6
                for other_phase, until in phase_ends.items()
                if other_phase != phase
            )
            phase_ends[phase] = max(end, phase_ends.get(phase, 0.0))


@given(cases)
def test_ledger_balances_staleness_is_bounded_and_phases_exclude_each_other(case: SimulationCase):
    result = case.run()
    check_ledger(case, result)
    check_devices(case, result)


@given(cases, st.integers(0, 1))
def test_stale_groups_are_dropped_and_replaced(case: SimulationCase, staleness: int):
    run_options = replace(case.run_options, depth=staleness + 2, on_stale="drop")
    result = replace(case, run_options=run_options, staleness=staleness).run()
    counts = result.ledger
    assert counts.trained == 4 * case.workload.groups_per_step
    assert counts.admitted == counts.trained + counts.dropped + counts.in_flight
    assert result.exclude_steps(0).staleness_max <= staleness


@given(cases)
def test_equal_seeds_give_equal_runs(case: SimulationCase):
    first, second = case.run(), case.run()
    assert first.step_ends == second.step_ends
    assert first.spans == second.spans
