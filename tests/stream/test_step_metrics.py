"""Step metrics, computed from facts small enough to check by hand."""

import math
from dataclasses import fields
from typing import Any

import pytest

from streamrl.buffer.run_log import LedgerCounts, TrainedGroup
from streamrl.buffer.shard import ShardStats
from streamrl.messages import GroupInfo
from streamrl.stream.protocols import FilterTally, StepResult
from streamrl.stream.step_metrics import StageActivity, StepFacts, compute_step_metrics
from streamrl.telemetry.metric_names import Histogram, validate_row
from streamrl.telemetry.spans import Span


def group(uid: str, versions: dict[int, int], ready: int) -> TrainedGroup:
    tokens = sum(versions.values())
    info = GroupInfo((tokens + 3, 3), tokens, tuple(sorted(versions.items())))
    return TrainedGroup(uid, info, ready)


def facts(**changes: object) -> StepFacts:
    values: dict[str, Any] = {
        "version": 5,
        "groups": [group("a", {4: 6, 5: 2}, ready=5), group("b", {3: 4}, ready=4)],
        "metric_sums": {
            "rollouts": 4.0,
            "groups": 2.0,
            "equal_score_groups": 1.0,
            "included": 4.0,
            "score_sum": 3.0,
            "score_squared_sum": 3.0,
            "reward/exact_sum": 3.0,
            "sampled_sum": 12.0,
            "sampled_max": 8.0,
            "probability_sum": 10.0,
            "truncated_sum": 1.0,
        },
        "metrics": {"policy/grad_norm": 0.5, "loss/policy": -0.1},
        "queue_stats": ShardStats(
            depth={"generate": 0.5, "reward": 1.5},
            num_bytes=100,
            oldest_age_s=2.0,
            uids=("c",),
            counts={"redelivered": 3, "refused": 2},
            journal_bytes=5000,
            fsync_s=0.25,
        ),
        "ledger_counts": LedgerCounts(10, 8, 0, 1, 1, (("reward_error", 1),)),
        "activity": {
            "generate": StageActivity(
                "generate",
                "generator",
                2,
                [Span("g0", "generate", 0, 10.0, 12.0), Span("g1", "generate", 0, 11.0, 12.0)],
            ),
            "reward": StageActivity("score", "reward", 1, [Span("r", "reward", 0, 12.0, 12.5)]),
            "train": StageActivity("train", "policy", 1, [Span("t", "train", 0, 11.0, 15.0)]),
        },
        "start_s": 10.0,
        "end_s": 14.0,
        "max_staleness": 2,
    }
    values |= changes
    names = {field.name for field in fields(StepResult)}
    step = {name: values.pop(name) for name in names & values.keys()}
    outcome = StepResult(**step, results_by_role={}, adaptive_params={}, ended_at=14.0)
    return StepFacts(outcome, **values)


def test_component_mean_ignores_abstaining_rollouts():
    sums = {
        **facts().metric_sums,
        "reward/exact_absent": 1.0,
        "reward/b_sum": 0.0,
        "reward/b_absent": 4.0,
    }
    row = compute_step_metrics(facts(metric_sums=sums))
    assert row["reward/exact"] == 1.0
    assert math.isnan(row["reward/b"])  # type: ignore[arg-type]
    validate_row(row)


def test_staleness_is_per_token_and_splits_into_flight_and_queue_time():
    row = compute_step_metrics(facts())
    # Tokens: 6 of staleness 1, 2 of 0, 4 of 2. Group b waited one version in the queue.
    assert row["staleness/mean"] == pytest.approx((6 * 1 + 4 * 2) / 12)
    assert row["staleness/max"] == 2
    assert row["staleness/in_queue_mean"] == pytest.approx(4 / 12)
    assert row["staleness/in_flight_mean"] == pytest.approx(10 / 12)
    histogram = row["staleness/histogram"]
    assert isinstance(histogram, Histogram)
    assert histogram.counts == (2, 6, 4)


EXPECTED = {
    "reward/mean": 0.75,
    "reward/exact": 0.75,
    "reward/std": math.sqrt(0.75 - 0.75**2),
    "rollout/truncated_frac": 0.25,
    "rollout/length_mean": 3.0,
    "rollout/probability_mean": 10 / 12,
    "rollout/length_max": 8.0,
    "idle/generate": 1 - 3.0 / (2 * 4.0),
    "idle/reward": 1 - 0.5 / 4.0,
    "idle/train": 1 - 3.0 / 4.0,  # spans are clipped to the step
    "time/generate_s": 1.5,
    "time/train_s": 3.0,
    "time/step_s": 4.0,
    "rollout/tokens_per_s": 12 / 1.5,
    "queue/depth/reward": 1.5,
    "queue/bytes": 100,
    "queue/oldest_age_s": 2.0,
    "queue/redelivered": 3,
    "queue/refused": 2,
    "journal/bytes": 5000,
    "journal/fsync_s": 0.25,
    "ledger/admitted": 10,
    "drops/reward_error": 1,
    "throughput/groups_per_s": 0.5,
    "filter/share": 0,
    "filter/generate_s": 0,
    "filter/score_s": 0,
    "stale/share": 0,
}


def test_a_row_has_the_contracts_metrics_with_the_values_of_the_worked_example():
    row = compute_step_metrics(facts())
    validate_row(row)
    assert {name: row[name] for name in EXPECTED} == pytest.approx(EXPECTED)


def test_filter_time_is_prorated_by_tokens():
    # 12 sampled tokens in the two trained groups, 24 tokens with prompts.
    tally = FilterTally(num_groups=6, num_tokens=72, num_sampled_tokens=36, oversample=4.0)
    row = compute_step_metrics(facts(filter_tally=tally))
    assert row["filter/share"] == 0.75
    assert row["filter/generate_s"] == pytest.approx(1.5 * 36 / (36 + 12))
    assert row["filter/score_s"] == pytest.approx(0.5 * 72 / (72 + 24))
    assert row["filter/oversample"] == 4.0


def test_stale_groups_are_compared_with_the_trained_ones():
    # Two trained groups of two rollouts and 6 sampled tokens each: 3 tokens a rollout.
    tally = FilterTally()
    for is_lost in (True, False):
        tally.add_stale_group(GroupInfo((14, 16), 24, ((0, 24),)), is_lost=is_lost)
    row = compute_step_metrics(facts(filter_tally=tally))
    assert row["stale/share"] == 0.5
    assert row["stale/length_ratio"] == pytest.approx(12 / 3)
    assert row["stale/lost_prompts"] == 1


def test_overlapping_stages_of_a_process_count_once():
    step_facts = facts()
    greedy = StageActivity("generate", "generator", 2, [Span("g0", "greedy", 1, 11.0, 13.0)])
    activity = {**step_facts.activity, "greedy": greedy}
    row = compute_step_metrics(facts(activity=activity))
    # g0 from 10 to 13, g1 from 11 to 12.
    assert row["time/generate_s"] == pytest.approx((3.0 + 1.0) / 2)
    assert row["idle/greedy"] == pytest.approx(1 - 2.0 / 8.0)
    assert row["idle/generate"] == compute_step_metrics(step_facts)["idle/generate"]
