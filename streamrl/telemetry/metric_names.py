"""Metrics contract: every name that a run logs, with unit and meaning, as data.

Names are stable. `<stage>` and other placeholders stand for one path segment. A metric without a
measurement in a step is NaN, never left out.
"""

import difflib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

MAX_BINS = 512
STALENESS_HISTOGRAM = "staleness/histogram"
WAIT_METRICS = EVALUATE_TIME, CHECKPOINT_TIME = "time/evaluate_s", "time/checkpoint_s"
"""Seconds of a step in which training waited; without a value in other steps."""


@dataclass(frozen=True)
class Histogram:
    """Counts per bin as a metric value; bin i is [edges[i], edges[i + 1]).

    Raises ValueError unless there are 1 to MAX_BINS bins, one more edge than counts, ascending
    edges and no negative count.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.counts) <= MAX_BINS or len(self.edges) != len(self.counts) + 1:
            sizes = f"{len(self.edges)} edges for {len(self.counts)} counts"
            raise ValueError(f"histogram: {sizes}, wanted one more and 1 to {MAX_BINS} bins")
        if any(right <= left for left, right in itertools.pairwise(self.edges)):
            raise ValueError(f"histogram: edges do not ascend: {self.edges}")
        if min(self.counts) < 0:
            raise ValueError(f"histogram: a count is negative: {self.counts}")

    @classmethod
    def from_integer_counts(cls, counts: Mapping[int, int], *, maximum: int = 0) -> "Histogram":
        """Build a histogram with a bin of width 1 for each integer from 0 to the largest key.

        counts: counts (tokens) by non-negative integer (staleness). Larger keys than MAX_BINS - 1
            count in the last bin.
        maximum: continue with empty bins up to this integer.
        """
        if min(counts, default=0) < 0:
            raise ValueError(f"histogram: {min(counts)} is negative")
        last = min(max(maximum, *counts, 0), MAX_BINS - 1)
        bins = [0] * (last + 1)
        for value, count in counts.items():
            bins[min(value, last)] += count
        return cls(tuple(range(last + 2)), tuple(bins))

    def to_json(self) -> dict[str, list[float]]:
        return {"edges": list(self.edges), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Histogram":
        return cls(tuple(value["edges"]), tuple(value["counts"]))


MetricsRow = Mapping[str, float | Histogram]
NON_METRIC_KEYS = ("step", "time")
"""Keys of a line of metrics.jsonl that are not metrics."""


@dataclass(frozen=True)
class MetricSpec:
    """A metric that runs log.

    name: may hold a `<placeholder>` for one path segment.
    unit: empty for plain numbers.
    has_episodes: only runs with an environment log the metric.
    """

    name: str
    unit: str
    meaning: str
    has_episodes: bool = False

    @property
    def is_pattern(self) -> bool:
        return "<" in self.name

    @property
    def is_histogram(self) -> bool:
        return self.name == STALENESS_HISTOGRAM

    def matches_name(self, name: str) -> bool:
        """Return whether a logged name is this metric; a placeholder stands for any segment."""
        return re.fullmatch(re.sub("<[a-z]+>", "[^/]+", self.name), name) is not None


EPISODE_METRICS = tuple(
    MetricSpec(f"episode/{name}", unit, meaning, has_episodes=True)
    for name, unit, meaning in (
        ("turns", "turns", "mean turns of the episodes for training that ended since the last row"),
        ("sampled_tokens", "tokens", "mean sampled tokens of those episodes"),
        ("observed_tokens", "tokens", "mean tokens that their environment wrote"),
        ("samples", "samples", "mean training samples of those episodes"),
        ("calls", "calls", "mean tool calls of those episodes"),
        ("environment_s", "s", "mean time that those episodes waited for their environment"),
        ("malformed_frac", "fraction", "calls that name no tool, do not parse or do not fit"),
        ("tool_error_frac", "fraction", "calls whose tool raised"),
        ("tool_timeout_frac", "fraction", "calls past their deadline"),
        ("truncated_frac", "fraction", "episodes that ended at a limit of turns or tokens"),
        ("timeout_frac", "fraction", "episodes that ended at the limit of their time"),
        ("infra_errors", "episodes", "attempts at an episode whose environment failed"),
        ("open", "episodes", "episodes open now"),
        ("decode_frac", "fraction", "share of the episodes' time in which the engine samples"),
        ("wait_frac", "fraction", "share in which they wait for a decode slot or the devices"),
        ("environment_frac", "fraction", "share in which they wait for their environment"),
    )
)
EVALUATED_EPISODE_METRICS = tuple(
    MetricSpec(f"eval/{name}", unit, meaning, has_episodes=True)
    for name, unit, meaning in (
        ("turns", "turns", "mean turns of the evaluated episodes"),
        ("calls", "calls", "mean tool calls of the evaluated episodes"),
        ("malformed_frac", "fraction", "calls that name no tool, do not parse or do not fit"),
        (
            "truncated_frac",
            "fraction",
            "evaluated episodes at a limit of turns or tokens",
        ),
        ("timeout_frac", "fraction", "evaluated episodes at the limit of their time"),
    )
)
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("reward/mean", "", "mean combined reward of the included rollouts of the step"),
    MetricSpec("reward/std", "", "standard deviation of that reward over these rollouts"),
    MetricSpec("reward/<component>", "", "mean of one named reward before combination"),
    MetricSpec(
        "reward/<component>/<number>", "", "mean of an extra number that the reward reports"
    ),
    MetricSpec("cost/mean", "", "mean combined cost of these rollouts; NaN without costs"),
    MetricSpec("cost/<component>", "", "mean of one named cost before combination"),
    MetricSpec("cost/<component>/<number>", "", "mean of an extra number that the cost reports"),
    MetricSpec("loss/policy", "", "policy loss, normalized over the whole step"),
    MetricSpec("loss/value", "", "critic loss, normalized over the whole step"),
    MetricSpec("loss/cost_value", "", "loss of the cost critic, normalized over the whole step"),
    MetricSpec("loss/ptx", "", "pretraining loss, as added to the policy loss"),
    MetricSpec("loss/kl", "", "KL penalty to the reference, as added to the policy loss"),
    MetricSpec("loss/entropy", "", "entropy bonus, as added to the policy loss"),
    MetricSpec("policy/clip_frac", "fraction", "tokens whose probability ratio was clipped"),
    MetricSpec("policy/ratio_mean", "", "mean ratio of trainer to generator probability per token"),
    MetricSpec("policy/entropy", "nats", "mean entropy of the policy per trained token"),
    MetricSpec(
        "policy/ess", "fraction", "effective sample size of the ratios over the token count"
    ),
    MetricSpec(
        "policy/kl_ref", "nats", "mean KL estimate of the policy to the reference per token"
    ),
    MetricSpec(
        "policy/kl_coef", "", "coefficient of the KL divergence from the reference; 0 without"
    ),
    MetricSpec("policy/grad_norm", "", "norm of the policy's gradient before clipping"),
    MetricSpec("policy/lr", "", "learning rate of the step"),
    MetricSpec("dial/<name>", "", "adaptive parameter after the step, such as dial/lagrange"),
    MetricSpec(
        "critic/explained_variance",
        "fraction",
        "variance of the returns explained by the critic's values",
    ),
    MetricSpec("critic/value_mean", "", "mean value per trained token"),
    MetricSpec("critic/clip_frac", "fraction", "tokens whose value moved beyond the clip range"),
    MetricSpec("critic/grad_norm", "", "norm of the critic's gradient before clipping"),
    MetricSpec("critic/lr", "", "learning rate of the critic"),
    MetricSpec(
        "cost_critic/explained_variance",
        "fraction",
        "variance of the cost returns explained by the cost critic",
    ),
    MetricSpec("cost_critic/value_mean", "", "mean expected cost per trained token"),
    MetricSpec("cost_critic/clip_frac", "fraction", "as critic/clip_frac"),
    MetricSpec("cost_critic/grad_norm", "", "as critic/grad_norm"),
    MetricSpec("cost_critic/lr", "", "learning rate of the cost critic"),
    MetricSpec(
        "correction/kl", "nats", "KL divergence of the sampling from the trained policy per token"
    ),
    MetricSpec("correction/chi2_token", "", "variance of the trained to sampling ratio per token"),
    MetricSpec("correction/chi2_sequence", "", "variance of the same ratio over whole rollouts"),
    MetricSpec("correction/ratio_p01", "", "1st percentile of the ratios"),
    MetricSpec("correction/ratio_p50", "", "median of the ratios"),
    MetricSpec("correction/ratio_p99", "", "99th percentile of the ratios"),
    MetricSpec(
        "correction/weight_mean", "", "mean importance weight of the tokens that were not rejected"
    ),
    MetricSpec(
        "correction/rejected_frac",
        "fraction",
        "tokens rejected because their ratio is out of bounds",
    ),
    MetricSpec("rollout/length_mean", "tokens", "mean sampled tokens of a rollout"),
    MetricSpec("rollout/length_max", "tokens", "most sampled tokens of a rollout"),
    MetricSpec("rollout/truncated_frac", "fraction", "rollouts that ended at the length limit"),
    MetricSpec("rollout/equal_score_frac", "fraction", "groups without a difference in score"),
    MetricSpec("rollout/tokens_per_s", "tokens/s", "sampled tokens over the generators' busy time"),
    MetricSpec("queue/depth/<stage>", "groups", "groups that wait for the stage"),
    MetricSpec("queue/bytes", "bytes", "columns held by all shards of the queue"),
    MetricSpec("queue/oldest_age_s", "s", "age of the oldest group in the queue"),
    MetricSpec("queue/redelivered", "groups", "groups requeued in the step and leased again"),
    MetricSpec("queue/hedged", "groups", "groups leased to a second holder in the step"),
    MetricSpec("queue/refused", "groups", "late or duplicate commits refused in the step"),
    MetricSpec("filter/share", "fraction", "filtered groups over filtered and trained groups"),
    MetricSpec("filter/generate_s", "s", "part of time/generate_s spent on filtered groups"),
    MetricSpec("filter/score_s", "s", "part of the scorers' reward time spent on filtered groups"),
    MetricSpec("filter/oversample", "", "prompts admitted per group of a step"),
    MetricSpec("stale/share", "fraction", "groups dropped as stale over these and trained groups"),
    MetricSpec(
        "stale/length_ratio", "", "tokens of a rollout dropped as stale over a trained one's"
    ),
    MetricSpec("stale/lost_prompts", "prompts", "stale in each attempt (queue.max_attempts)"),
    MetricSpec("journal/bytes", "bytes", "size of the shards' journals on disk"),
    MetricSpec("journal/fsync_s", "s", "time of all shards in fsync in the step, summed"),
    MetricSpec("staleness/mean", "versions", "mean staleness of the tokens trained in the step"),
    MetricSpec("staleness/max", "versions", "largest staleness of a token trained in the step"),
    MetricSpec("staleness/in_flight_mean", "versions", "part that arose during generation"),
    MetricSpec("staleness/in_queue_mean", "versions", "part that arose while groups waited"),
    MetricSpec(STALENESS_HISTOGRAM, "tokens", "trained tokens by staleness in versions"),
    MetricSpec(
        "idle/<stage>",
        "fraction",
        "fraction of the step's wall time in which the stage did not compute",
    ),
    MetricSpec("cpu/machine", "cores", "busy cores of the coordinator's machine, by any process"),
    MetricSpec("cpu/stages", "cores", "cores kept busy by the processes of all stages"),
    MetricSpec("cpu/queue", "cores", "cores kept busy by the queue's shards and the coordinator"),
    MetricSpec("data/<fate>", "rows", "rows drawn and skipped, or truncated, since the last row"),
    MetricSpec("drops/<cause>", "groups", "groups dropped for this cause since the run began"),
    MetricSpec("verdicts/<verdict>", "", "reward components with this verdict since the last row"),
    MetricSpec(
        "scorer/killed/<cause>",
        "",
        "reward processes and async calls ended, by cause, since the last row",
    ),
    MetricSpec("weights/version", "", "policy_version after the step"),
    MetricSpec(
        "weights/skew_max", "versions", "newest published version minus the oldest version in use"
    ),
    MetricSpec("weights/publish_s", "s", "longest publish since the last step; NaN without one"),
    MetricSpec("weights/pull_s", "s", "longest time from notice of a version to its use"),
    MetricSpec("weights/pause_s", "s", "longest pause of sampling for a new version"),
    MetricSpec("weights/bytes", "bytes", "weights moved between processes since the last step"),
    MetricSpec(
        "weights/copied_bytes",
        "bytes",
        "policy weights copied within processes since the last step (colocated runs)",
    ),
    MetricSpec("weights/bytes_per_s", "bytes/s", "weights moved over the time of the pulls"),
    MetricSpec("weights/interrupted", "rollouts", "rollouts in progress when a version was loaded"),
    MetricSpec(
        "weights/tokens_per_version",
        "tokens",
        "trained tokens over the number of versions that sampled them",
    ),
    MetricSpec(
        "weights/probe_diff", "nats", "largest difference of the logprob check from the trainer"
    ),
    MetricSpec("weights/faults", "", "publishes and pulls that failed since the run began"),
    MetricSpec("ledger/admitted", "groups", "prompts admitted since the run began"),
    MetricSpec("ledger/trained", "groups", "groups trained since the run began"),
    MetricSpec("ledger/filtered", "groups", "groups filtered since the run began"),
    MetricSpec("ledger/dropped", "groups", "groups dropped for any cause since the run began"),
    MetricSpec("ledger/in_flight", "groups", "groups admitted and not yet ended"),
    *EPISODE_METRICS,
    MetricSpec("time/step_s", "s", "wall time from the last step's end to this one's"),
    MetricSpec("time/generate_s", "s", "time the generators computed in the step"),
    MetricSpec("time/score_s", "s", "time the scorers computed in the step"),
    MetricSpec("time/train_s", "s", "time the trainers computed in the step"),
    MetricSpec(
        EVALUATE_TIME,
        "s",
        "part of time/step_s in which training waited for an evaluation (only in such steps)",
    ),
    MetricSpec(
        CHECKPOINT_TIME,
        "s",
        "part of time/step_s in which training waited for a checkpoint (only in such steps)",
    ),
    MetricSpec("throughput/tokens_per_s", "tokens/s", "tokens trained over the step's wall time"),
    MetricSpec("throughput/groups_per_s", "groups/s", "groups trained over the step's wall time"),
    MetricSpec(
        "memory/<phase>_mb",
        "MB",
        "peak memory of a worker in this phase since the last row (colocated runs)",
    ),
    *EVALUATED_EPISODE_METRICS,
    MetricSpec("eval/<name>", "", "such as eval/pass_at_1; rollouts: eval/scored, eval/unscored"),
    MetricSpec("eval/interval/<name>", "", "bound of the 95 % interval, such as pass_at_1_low"),
    MetricSpec(
        "eval/source/<source>/<name>", "", "evaluation of one data_source, such as openai~gsm8k"
    ),
    MetricSpec("eval/file/<file>/<name>", "", "evaluation of one file"),
)
_METRICS_BY_NAME = {metric.name: metric for metric in METRICS if not metric.is_pattern}
_METRIC_PATTERNS = tuple(metric for metric in METRICS if metric.is_pattern)


def find_metric(name: str) -> MetricSpec:
    """Return the metric's spec for a logged name.

    Raises ValueError, with the nearest names, for a name that no spec matches.
    """
    if name in _METRICS_BY_NAME:
        return _METRICS_BY_NAME[name]
    for metric in _METRIC_PATTERNS:
        if metric.matches_name(name):
            return metric
    close = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"metric {name} is not in the metrics contract{hint}")


def validate_row(row: MetricsRow) -> None:
    """Raise ValueError if a metrics row has an unknown name or a value of the wrong type.

    Values are numbers (including numpy scalars, excluding bool), or a Histogram where the metric's
    spec requires it.
    """
    for name, value in row.items():
        expected_type = Histogram if find_metric(name).is_histogram else Real
        if not isinstance(value, expected_type) or isinstance(value, bool):
            raise ValueError(f"metric {name}={value!r}: must be a {expected_type.__name__}")


def find_missing_metrics(row: MetricsRow) -> list[str]:
    """Return the names that every run must log but that this metrics row lacks.

    They are the names without a placeholder, but for those of episodes.
    """
    return [
        name
        for name, metric in _METRICS_BY_NAME.items()
        if name not in row and not metric.has_episodes
    ]


def to_json_value(value: float | Histogram) -> int | float | dict[str, list[float]] | None:
    """Convert a metric value to JSON; NaN and infinities become null."""
    if isinstance(value, Histogram):
        return value.to_json()
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def parse_metrics_row(line: Mapping[str, Any]) -> MetricsRow:
    """Convert a line of metrics.jsonl back to a metrics row, without null values.

    Raises ValueError for a value that is neither a number nor a histogram.
    """
    row: dict[str, float | Histogram] = {}
    for name, value in line.items():
        if name in NON_METRIC_KEYS or value is None:
            continue
        try:
            row[name] = value if isinstance(value, int | float) else Histogram.from_json(value)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{name}={value!r:.40}: neither a number nor a histogram") from None
    return row
