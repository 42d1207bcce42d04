"""Node failures in a simulation: requeued groups, repeated steps, cost."""

import math
from dataclasses import replace

import pytest

from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.planner.simulator.replicas.failures import FailureModel
from streamrl.planner.simulator.simulation import run_simulation
from tests.planner.simulator.test_simulation import APART, FLOW, GENERATOR, TIMINGS, WORKLOAD, on


def run(placement: Placement, failures: FailureModel | None, *, replicas: int = 1, seed: int = 1):
    timings = replace(TIMINGS, generator=replace(GENERATOR, replicas=replicas))
    return run_simulation(
        FLOW, placement, timings, WORKLOAD, steps=12, seed=seed, failures=failures
    )


def test_longer_restarts_cost_more_time():
    end_times = [run(APART, None).step_ends[-1]]
    for restart_s in (5.0, 50.0):
        result = run(APART, FailureModel(150.0, restart_s, node_devices=1))
        assert result.crashes
        assert result.ledger.trained == 24
        end_times.append(result.step_ends[-1])
    assert end_times[0] < end_times[1] < end_times[2]


@pytest.mark.parametrize("checkpoint_every", [1, 6, 100])
def test_the_mean_step_includes_time_lost_in_crashes(checkpoint_every: int):
    plain = run(APART, None)
    failures = FailureModel(150.0, 50.0, checkpoint_every=checkpoint_every, node_devices=2)
    result = run(APART, failures, seed=4)
    assert result.crashes
    assert result.mean_step_s > plain.mean_step_s and result.tokens_per_s < plain.tokens_per_s


def test_groups_of_a_crashed_generator_are_requeued():
    # The generator and the trainer are on separate nodes.
    result = run(APART, FailureModel(60.0, 3.0, node_devices=1), seed=2)
    crashes = [crash for crash in result.crashes if not crash.is_restart]
    assert {crash.processes for crash in crashes} == {("generator-0",)}
    assert any(crash.lost_tokens for crash in crashes)
    assert all(crash.repeated_steps == 0 for crash in crashes)


def test_a_trainer_crash_repeats_the_steps_since_the_checkpoint():
    often = run(APART, FailureModel(150.0, 5.0, checkpoint_every=1, node_devices=2), seed=4)
    seldom = run(APART, FailureModel(150.0, 5.0, checkpoint_every=6, node_devices=2), seed=4)
    assert all(crash.is_restart for crash in (*often.crashes, *seldom.crashes))
    assert often.repeated_steps == 0 < seldom.repeated_steps
    assert often.step_ends[-1] < seldom.step_ends[-1]
    # Repeated steps train the kept groups, with the same rollouts.
    without_failures = run(APART, None)
    groups = [sorted(g.uid for g in o.groups) for o in without_failures.outcomes]
    assert [sorted(g.uid for g in o.groups) for o in seldom.outcomes] == groups


def test_a_node_failure_kills_only_its_replicas():
    placement = Placement({"generate": on(0), "train": on(2)})
    result = run(placement, FailureModel(200.0, 5.0, node_devices=1))
    assert {name for crash in result.crashes for name in crash.processes} <= {
        "generator-0",
        "reward-0",
    }


def test_failure_times_must_be_positive_and_finite():
    with pytest.raises(ConfigError, match="mttf_s=0"):
        FailureModel(0, 1.0)
    with pytest.raises(ConfigError, match="checkpoint_every=0"):
        FailureModel(1.0, 1.0, checkpoint_every=0)
    with pytest.raises(ConfigError, match="restart_s=inf: must be above 0 and finite"):
        FailureModel(1.0, math.inf)
    with pytest.raises(ConfigError, match="mttf_s=5: must be above restart_s=5"):
        FailureModel(5.0, 5.0)


def test_more_than_five_expected_failures_without_a_checkpoint_are_an_error():
    # Devices 0 to 3 and 6 to 9 are on three nodes of four devices; one fails every 10 s.
    failures, trained = FailureModel(30.0, 1.0, 10, node_devices=4), [Mesh(0, 4), Mesh(6, 4)]
    failures.check_progress(trained, first_s=50.0, step_s=5.0, steps=100)
    failures.check_progress(trained, first_s=50.0, step_s=50.0, steps=1)
    message = "one of 3 training nodes fails every 10 s: the first rollouts take 51 s"
    with pytest.raises(ConfigError, match=message):
        failures.check_progress(trained, first_s=51.0, step_s=5.0, steps=100)
    with pytest.raises(ConfigError, match="10 steps without a checkpoint take 51 s"):
        failures.check_progress(trained, first_s=50.0, step_s=5.1, steps=100)
