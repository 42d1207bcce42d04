"""Alerts: raised once while their condition holds."""

import math

from streamrl.telemetry.alerts import QUIET_STEPS, AlertWatch


def test_a_low_sample_size_is_alerted_once_while_it_lasts():
    watch = AlertWatch()
    alerts = [watch.find_alerts(step, {"policy/ess": 0.2}) for step in range(1, 100)]
    assert ["policy/ess is 0.20, below 0.3" in text for (text,) in alerts[:1]] == [True]
    assert not any(alerts[1:])


def test_an_alert_returns_after_quiet_steps():
    watch = AlertWatch()
    low, high = {"policy/ess": 0.2}, {"policy/ess": 0.9}
    assert watch.find_alerts(1, low)
    for step in range(2, QUIET_STEPS):
        assert not watch.find_alerts(step, high)
    assert not watch.find_alerts(QUIET_STEPS, low)
    assert not watch.find_alerts(QUIET_STEPS + 1, high)
    assert watch.find_alerts(2 * QUIET_STEPS + 1, low)


def test_a_filter_that_takes_nine_groups_in_ten_is_alerted():
    watch = AlertWatch()
    assert not watch.find_alerts(1, {"filter/share": 0.89})
    assert "the filter takes 95.0%" in watch.find_alerts(2, {"filter/share": 0.95})[0]


def test_evaluated_rollouts_without_a_score_are_alerted_above_a_share():
    watch = AlertWatch()
    assert not watch.find_alerts(1, {"eval/scored": 61, "eval/unscored": 3})
    (text,) = watch.find_alerts(2, {"eval/scored": 38, "eval/unscored": 26})
    assert text.startswith("26 of 64 evaluated rollouts have no score")


def test_drops_are_alerted_and_those_before_a_resume_are_not():
    first = AlertWatch()
    assert "2 groups were dropped" in first.find_alerts(1, {"ledger/dropped": 2})[0]
    resumed = AlertWatch()
    assert not resumed.find_alerts(5, {"ledger/dropped": 2})
    assert "1 groups were dropped" in resumed.find_alerts(6, {"ledger/dropped": 3})[0]


def test_metrics_without_a_value_raise_nothing():
    row = {"policy/ess": math.nan, "filter/share": math.nan, "ledger/dropped": math.nan}
    assert AlertWatch().find_alerts(1, row) == []
