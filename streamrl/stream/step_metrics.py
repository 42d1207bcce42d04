"""Compute the metrics of a finished step. Pure: facts in, one row of metrics out."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from streamrl.dataflow import GENERATE_CALL, REWARD_CALL
from streamrl.messages import GroupInfo, find_replayed_uid
from streamrl.stream.protocols import FilterTally, StepResult
from streamrl.telemetry.metric_names import METRICS, STALENESS_HISTOGRAM, Histogram
from streamrl.telemetry.spans import Span, compute_idle_fraction, sum_busy_s

NAN = math.nan
TRAINED_PREFIXES = ("loss/", "policy/", "critic/", "cost_critic/", "correction/", "routing/")
TRAINED_METRICS = tuple(m.name for m in METRICS if m.name.startswith(TRAINED_PREFIXES))
"""Metrics of trained models; NaN in steps that do not train the model."""
REPORTED_METRICS = ("rollout/all_right_frac", "rollout/all_wrong_frac")
"""Metrics that scorers report; NaN in steps before which none did."""


@dataclass(frozen=True)
class StageActivity:
    """Busy spans of a stage in the window of a training step, and number of its processes.

    kind: generate, score or train. Stages with the same `role` share the same processes.
    """

    kind: str
    role: str
    num_processes: int
    spans: Sequence[Span]

    @property
    def max_processes(self) -> int:
        """Largest number of processes of the stage, including those that left during the step."""
        return max(self.num_processes, len({span.process for span in self.spans}))


@dataclass(frozen=True)
class StepFacts:
    """Inputs from which the metrics of a finished training step are computed.

    outcome: the step's groups, and queue and ledger at its end.
    metric_sums: sums over micro-batches and ranks.
    metrics: finished values, added to the result unchanged.
    activity: per stage, within [start_s, end_s], the window since the previous step.
    """

    outcome: StepResult
    metric_sums: Mapping[str, float]
    metrics: Mapping[str, float]
    activity: Mapping[str, StageActivity]
    start_s: float
    end_s: float
    max_staleness: int


def compute_step_metrics(facts: StepFacts) -> dict[str, float | Histogram]:
    """Return all metrics of a training step by name (telemetry/metric_names.py).

    Metrics of models that the step did not train are NaN, and those that scorers report, which they
    may do only after the step.
    """
    scores = ("reward/mean", "reward/std", "rollout/equal_score_frac", "cost/mean")
    unknown = (*TRAINED_METRICS, *REPORTED_METRICS, *scores)
    row: dict[str, float | Histogram] = dict.fromkeys(unknown, NAN)
    if GENERATE_CALL.stage in facts.activity:
        row |= compute_score_metrics(facts.metric_sums)
    row |= _compute_rollout_metrics(facts)
    row |= _compute_staleness_metrics(facts)
    row |= _compute_queue_metrics(facts)
    row |= _compute_filter_metrics(facts)
    row |= _compute_time_metrics(facts)
    return {**row, **facts.metrics}


def average_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}


def compute_score_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of rewards and costs of a step: means over its included rollouts."""
    count = sums["included"] or NAN
    row: dict[str, float] = {}
    for name, value in sums.items():
        if name.startswith(("reward/", "cost/")) and name.endswith("_sum"):
            component = name.removesuffix("_sum")
            num_scored = count - sums.get(f"{component}_absent", 0.0)
            row[component] = value / num_scored if num_scored else NAN
    if "cost_sum" in sums:
        row["cost/mean"] = sums["cost_sum"] / count
    mean = sums["score_sum"] / count
    variance = max(sums["score_squared_sum"] / count - mean**2, 0.0)
    row |= {"reward/mean": mean, "reward/std": math.sqrt(variance)}
    return row | {"rollout/equal_score_frac": sums["equal_score_groups"] / (sums["groups"] or NAN)}


def _compute_rollout_metrics(facts: StepFacts) -> dict[str, float | Histogram]:
    sums, generate = facts.metric_sums, facts.activity.get(GENERATE_CALL.stage)
    busy = _compute_mean_busy_s(generate, facts) if generate else 0.0
    # A step may consist of replays alone.
    sampled, count = sums["sampled_sum"], sums["rollouts"] or NAN
    return {
        "rollout/length_mean": sampled / count,
        "rollout/length_max": sums["sampled_max"],
        "rollout/probability_mean": sums["probability_sum"] / (sampled or NAN) if generate else NAN,
        "rollout/truncated_frac": sums["truncated_sum"] / count,
        "rollout/tokens_per_s": sampled / busy if busy > 0 else NAN,
    }


def _compute_staleness_metrics(facts: StepFacts) -> dict[str, float | Histogram]:
    """Return how many versions old the trained tokens of a step are, and where they waited.

    Tokens of replays count apart.
    """
    tokens: Counter[int] = Counter()
    replays: Counter[int] = Counter()
    in_queue = 0
    for group in facts.outcome.groups:
        if find_replayed_uid(group.uid) is not None:
            replays[facts.outcome.version - group.info.min_version] += 1
            continue
        for version, count in group.info.version_tokens:
            tokens[facts.outcome.version - version] += count
            in_queue += (facts.outcome.version - group.ready_version) * count
    total = tokens.total() or NAN
    mean = sum(staleness * count for staleness, count in tokens.items()) / total
    return {
        "replay/groups": replays.total(),
        "replay/age_max": max(replays, default=NAN),
        "staleness/mean": mean,
        "staleness/max": max(tokens, default=NAN),
        "weights/tokens_per_version": total / (len(tokens) or NAN),
        "staleness/in_queue_mean": in_queue / total,
        "staleness/in_flight_mean": mean - in_queue / total,
        STALENESS_HISTOGRAM: Histogram.from_integer_counts(tokens, maximum=facts.max_staleness),
    }


def _compute_queue_metrics(facts: StepFacts) -> dict[str, float | Histogram]:
    ledger = facts.outcome.ledger_counts
    row: dict[str, float | Histogram] = {
        f"queue/depth/{stage}": depth for stage, depth in facts.outcome.queue_stats.depth.items()
    }
    row |= {f"drops/{cause}": count for cause, count in ledger.drops}
    for name in ("admitted", "trained", "filtered", "dropped", "in_flight"):
        row[f"ledger/{name}"] = vars(ledger)[name]
    return row | {
        "queue/bytes": facts.outcome.queue_stats.num_bytes,
        "queue/oldest_age_s": facts.outcome.queue_stats.oldest_age_s,
        **{f"queue/{name}": count for name, count in facts.outcome.queue_stats.counts.items()},
        "journal/bytes": facts.outcome.queue_stats.journal_bytes,
        "journal/fsync_s": facts.outcome.queue_stats.fsync_s,
    }


def _compute_filter_metrics(facts: StepFacts) -> dict[str, float | Histogram]:
    """Compute the metrics of the group filter, such as the time spent on filtered groups.

    The time is divided in proportion to tokens, because groups are sampled concurrently and scored
    in batches, so that spans belong to no single group. Example: if filtered groups have 30 % of
    the sampled tokens, 30 % of the generation time counts as filtered.
    """
    tally, infos = facts.outcome.filter_tally, [group.info for group in facts.outcome.groups]
    sampled = sum(info.num_loss_tokens for info in infos) + tally.num_sampled_tokens
    tokens = sum(info.num_tokens for info in infos) + tally.num_tokens
    generate_s, score_s = (
        _compute_mean_busy_s(facts.activity[stage], facts) if stage in facts.activity else 0.0
        for stage in (GENERATE_CALL.stage, REWARD_CALL.stage)
    )
    return {
        "filter/share": tally.num_groups / (tally.num_groups + len(infos)),
        "filter/generate_s": generate_s * tally.num_sampled_tokens / sampled,
        "filter/score_s": score_s * tally.num_tokens / tokens,
        "filter/oversample": tally.oversample,
        **_compute_stale_metrics(tally, infos),
    }


def _compute_stale_metrics(tally: FilterTally, infos: Sequence[GroupInfo]) -> dict[str, float]:
    """Compare the groups dropped as stale with the trained ones, by number and length."""
    trained = sum(info.num_loss_tokens for info in infos) / sum(len(i.lengths) for i in infos)
    rollouts = tally.num_stale_rollouts
    dropped = tally.num_stale_tokens / rollouts if rollouts else NAN
    return {
        "stale/share": tally.num_stale / (tally.num_stale + len(infos)),
        "stale/length_ratio": dropped / trained if trained else NAN,
        "stale/lost_prompts": tally.num_lost_prompts,
    }


def _compute_time_metrics(facts: StepFacts) -> dict[str, float | Histogram]:
    step_s = facts.end_s - facts.start_s
    busy = {"generate": 0.0, "score": 0.0, "train": 0.0}
    row: dict[str, float | Histogram] = {}
    for stage, activity in facts.activity.items():
        row[f"idle/{stage}"] = compute_idle_fraction(
            activity.spans,
            start=facts.start_s,
            end=facts.end_s,
            num_processes=activity.num_processes,
        )
    for activity in _merge_by_role(facts.activity):
        busy[activity.kind] += _compute_mean_busy_s(activity, facts)
    tokens = sum(group.info.num_tokens for group in facts.outcome.groups)
    row |= {f"time/{kind}_s": seconds for kind, seconds in busy.items()}
    return row | {
        "time/step_s": step_s,
        "throughput/tokens_per_s": tokens / step_s,
        "throughput/groups_per_s": len(facts.outcome.groups) / step_s,
    }


def _merge_by_role(activity: Mapping[str, StageActivity]) -> list[StageActivity]:
    """Merge the spans of stages of a kind that share the processes of a role."""
    merged: dict[tuple[str, str], StageActivity] = {}
    for stage_activity in activity.values():
        key = stage_activity.role, stage_activity.kind
        earlier = merged.get(key)
        spans = [*earlier.spans, *stage_activity.spans] if earlier else stage_activity.spans
        merged[key] = replace(stage_activity, spans=spans)
    return list(merged.values())


def _compute_mean_busy_s(activity: StageActivity, facts: StepFacts) -> float:
    """Return the busy time of a stage, mean over its processes, s."""
    busy_s = sum_busy_s(activity.spans, start=facts.start_s, end=facts.end_s)
    return busy_s / activity.max_processes
