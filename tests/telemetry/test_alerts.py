"""Alerts: raised once while their condition holds."""

import pytest

from streamrl.telemetry.alerts import QUIET_STEPS, AlertWatch


def test_an_alert_returns_after_quiet_steps():
    watch = AlertWatch()
    low, high = {"policy/ess": 0.2}, {"policy/ess": 0.9}
    assert watch.find_alerts(1, low)
    for step in range(2, QUIET_STEPS):
        assert not watch.find_alerts(step, high)
    assert not watch.find_alerts(QUIET_STEPS, low)
    assert not watch.find_alerts(QUIET_STEPS + 1, high)
    assert watch.find_alerts(2 * QUIET_STEPS + 1, low)


@pytest.mark.parametrize(
    ("quiet", "row", "text"),
    [
        ({"policy/ess": 0.3}, {"policy/ess": 0.2}, "policy/ess is 0.20, below 0.3"),
        ({"filter/share": 0.89}, {"filter/share": 0.95}, "the filter takes 95.0%"),
        (
            {"stale/share": 0.3, "stale/length_ratio": 1.0, "stale/lost_prompts": 0},
            {"stale/share": 0.2, "stale/length_ratio": 2.5, "stale/lost_prompts": 0},
            "20% of the groups were dropped as stale, with rollouts 2.5 times",
        ),
        (
            {},
            {"stale/share": 0.01, "stale/length_ratio": 1.0, "stale/lost_prompts": 2},
            "2 prompts for good: training sees less of what is slow; pipeline.on_stale=wait",
        ),
        (
            {"eval/scored": 61, "eval/unscored": 3},
            {"eval/scored": 38, "eval/unscored": 26},
            "26 of 64 evaluated rollouts have no score",
        ),
    ],
)
def test_a_condition_is_alerted_where_it_holds(quiet, row, text):
    watch = AlertWatch()
    assert not watch.find_alerts(1, quiet)
    (alert,) = watch.find_alerts(2, row)
    assert text in alert


def test_drops_are_alerted_and_those_before_a_resume_are_not():
    first = AlertWatch()
    assert "2 groups were dropped" in first.find_alerts(1, {"ledger/dropped": 2})[0]
    resumed = AlertWatch()
    assert not resumed.find_alerts(5, {"ledger/dropped": 2})
    assert "1 groups were dropped" in resumed.find_alerts(6, {"ledger/dropped": 3})[0]


def make_flat_row(mean: float, std: float = 0.0) -> dict[str, float]:
    return {"rollout/equal_score_frac": 1.0, "reward/mean": mean, "reward/std": std}


@pytest.mark.parametrize(
    ("mean", "std", "finding"),
    [
        (0.0, 0.0, "every rollout scores 0."),
        (1.0, 0.0, "every rollout scores 1."),
        (0.5, 0.5, "the rollouts of each prompt score the same"),
    ],
)
def test_groups_without_a_score_difference_are_alerted_after_three_steps(
    mean: float, std: float, finding: str
):
    watch, row = AlertWatch(compares_rollouts=True), make_flat_row(mean, std)
    alerts = [watch.find_alerts(step, row) for step in range(1, 50)]
    assert alerts[:2] == [[], []] and finding in alerts[2][0]
    assert "a better base model (docs/own_model.md), partial credit" in alerts[2][0]
    assert not any(alerts[3:]), "once while it lasts"


def test_one_group_with_a_difference_begins_the_three_steps_anew():
    watch, row = AlertWatch(compares_rollouts=True), make_flat_row(0.0)
    for step in range(1, 30):
        mixed = {"rollout/equal_score_frac": 31 / 32, "reward/std": 0.1}
        assert not watch.find_alerts(step, row | mixed if step % 3 == 0 else row)


def test_an_algorithm_that_compares_no_rollouts_of_a_group_needs_a_difference_between_groups():
    watch = AlertWatch()
    assert not any(watch.find_alerts(step, make_flat_row(0.5, 0.5)) for step in range(1, 10))
    alerts = [watch.find_alerts(step, make_flat_row(0.0)) for step in range(10, 20)]
    assert [bool(found) for found in alerts] == [step == 2 for step in range(10)]
