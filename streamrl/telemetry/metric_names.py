"""The metrics contract: every name a run may log, with its unit and meaning, as data.

Names are fixed. What stands in angle brackets, such as `<stage>`, is one path segment that the run
fills in. A metric with nothing to measure in a step is NaN, never left out.
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


@dataclass(frozen=True)
class Histogram:
    """Counts per bin as a metric value; bin i is [edges[i], edges[i + 1]).

    Raises ValueError unless there is one edge more than counts, edges ascend, no count is negative
    and there are 1 to MAX_BINS bins.
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
    def of_integers(cls, counts: Mapping[int, int], *, maximum: int = 0) -> "Histogram":
        """One bin of width 1 for each integer from 0 to the largest key, or to `maximum`.

        A key is a non-negative integer (staleness), its value how often it occurs (tokens). What
        lies past the last of MAX_BINS bins is counted in that bin.
        """
        if min(counts, default=0) < 0:
            raise ValueError(f"histogram: {min(counts)} is negative")
        last = min(max(maximum, *counts, 0), MAX_BINS - 1)
        bins = [0] * (last + 1)
        for value, count in counts.items():
            bins[min(value, last)] += count
        return cls(tuple(range(last + 2)), tuple(bins))

    def to_json(self) -> dict[str, list[float]]:
        """As JSON: {"edges": [...], "counts": [...]}."""
        return {"edges": list(self.edges), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Histogram":
        """Inverse of `to_json`."""
        return cls(tuple(value["edges"]), tuple(value["counts"]))


Row = Mapping[str, float | Histogram]
NO_METRICS = ("step", "time")
"""What a line of metrics.jsonl holds besides."""


@dataclass(frozen=True)
class Metric:
    """One line of the contract: `name` may hold a `<placeholder>`, `unit` is "" for numbers."""

    name: str
    unit: str
    meaning: str

    @property
    def is_pattern(self) -> bool:
        """True if the name holds a placeholder."""
        return "<" in self.name

    @property
    def is_histogram(self) -> bool:
        """True if the value is a Histogram, not a number."""
        return self.name == STALENESS_HISTOGRAM

    def matches(self, name: str) -> bool:
        """True if `name` is this metric, or fills in its placeholder with one segment."""
        return re.fullmatch(re.sub("<[a-z]+>", "[^/]+", self.name), name) is not None


METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "", "mean combined reward of the rollouts trained in the step"),
    Metric("reward/std", "", "standard deviation of that reward over the step's rollouts"),
    Metric("reward/<component>", "", "mean of one named reward before combination"),
    Metric("reward/<component>/<number>", "", "mean of a number that it gives besides"),
    Metric("cost/mean", "", "mean combined cost of those rollouts; NaN without costs"),
    Metric("cost/<component>", "", "mean of one named cost before combination"),
    Metric("cost/<component>/<number>", "", "the same of a cost"),
    Metric("loss/policy", "", "policy loss, normalised over the whole step"),
    Metric("loss/value", "", "critic loss, normalised over the whole step"),
    Metric("loss/cost_value", "", "loss of the critic of costs, likewise"),
    Metric("loss/ptx", "", "pretraining loss, as it enters the loss"),
    Metric("loss/kl", "", "KL penalty to the reference, as it enters the loss"),
    Metric("loss/entropy", "", "entropy bonus, as it enters the loss"),
    Metric("policy/clip_frac", "fraction", "tokens whose probability ratio was clipped"),
    Metric("policy/ratio_mean", "", "mean ratio of trainer to generator probability per token"),
    Metric("policy/entropy", "nats", "mean entropy of the policy per trained token"),
    Metric("policy/ess", "fraction", "effective sample size of the ratios over the token count"),
    Metric("policy/kl_ref", "nats", "mean KL estimate of the policy to the reference per token"),
    Metric("policy/kl_coef", "", "weight of the divergence from the reference; 0 for none"),
    Metric("policy/grad_norm", "", "norm of the policy's gradient before clipping"),
    Metric("policy/lr", "", "learning rate of the step"),
    Metric("dial/<name>", "", "a number that is set anew after every step, such as dial/lagrange"),
    Metric("critic/explained_variance", "fraction", "of the returns, by the critic's values"),
    Metric("critic/value_mean", "", "mean value per trained token"),
    Metric("critic/clip_frac", "fraction", "tokens whose value has moved beyond the clip"),
    Metric("critic/grad_norm", "", "norm of the critic's gradient before clipping"),
    Metric("critic/lr", "", "learning rate of the critic"),
    Metric("cost_critic/explained_variance", "fraction", "the same of the critic of costs"),
    Metric("cost_critic/value_mean", "", "mean expected cost per trained token"),
    Metric("cost_critic/clip_frac", "fraction", "as of the critic"),
    Metric("cost_critic/grad_norm", "", "as of the critic"),
    Metric("cost_critic/lr", "", "as of the critic"),
    Metric("correction/kl", "nats", "divergence of sampling from trained policy per token"),
    Metric("correction/chi2_token", "", "variance of the trained to sampling ratio per token"),
    Metric("correction/chi2_sequence", "", "the same of the ratio of whole rollouts"),
    Metric("correction/ratio_p01", "", "ratio below which a hundredth of the tokens is"),
    Metric("correction/ratio_p50", "", "median of the ratios"),
    Metric("correction/ratio_p99", "", "ratio above which a hundredth of the tokens is"),
    Metric("correction/weight_mean", "", "mean importance weight of the tokens that were kept"),
    Metric("correction/rejected_frac", "fraction", "tokens that were rejected as too far off"),
    Metric("rollout/length_mean", "tokens", "mean sampled tokens of a rollout"),
    Metric("rollout/length_max", "tokens", "most sampled tokens of a rollout"),
    Metric("rollout/truncated_frac", "fraction", "rollouts that ended at the length limit"),
    Metric("rollout/tokens_per_s", "tokens/s", "sampled tokens over the generators' busy time"),
    Metric("queue/depth/<stage>", "groups", "groups that wait for the stage"),
    Metric("queue/bytes", "bytes", "columns held by all shards of the queue"),
    Metric("queue/oldest_age_s", "s", "age of the oldest group in the queue"),
    Metric("queue/redelivered", "groups", "groups handed out again in the step, as work came back"),
    Metric("queue/hedged", "groups", "groups given to a second holder as well, in the step"),
    Metric("queue/refused", "groups", "late or double commits that were refused in the step"),
    Metric("filter/share", "fraction", "groups that were filtered of those filtered or trained"),
    Metric(
        "filter/generate_s", "s", "of time/generate_s: what went into groups that were filtered"
    ),
    Metric("filter/score_s", "s", "the same of the time the reward's scorers computed in the step"),
    Metric("filter/oversample", "", "prompts that were admitted for each place of a step"),
    Metric("journal/bytes", "bytes", "size of the shards' journals on the disk"),
    Metric("journal/fsync_s", "s", "time the shards spent in fsync, added up, in the step"),
    Metric("staleness/mean", "versions", "mean staleness of the tokens trained in the step"),
    Metric("staleness/max", "versions", "largest staleness of a token trained in the step"),
    Metric("staleness/in_flight_mean", "versions", "part that arose while a group was generated"),
    Metric("staleness/in_queue_mean", "versions", "part that arose while a group was waiting"),
    Metric(STALENESS_HISTOGRAM, "tokens", "trained tokens by staleness in versions"),
    Metric("idle/<stage>", "fraction", "part of the step's wall time the stage did not compute"),
    Metric("cpu/machine", "cores", "of the coordinator's machine that were busy, with anything"),
    Metric("cpu/stages", "cores", "kept busy by the processes of all stages"),
    Metric("cpu/queue", "cores", "kept busy by the queue's shards and the coordinator"),
    Metric("data/<fate>", "rows", "rows that were drawn and left out, or cut, since the last row"),
    Metric("drops/<cause>", "groups", "groups dropped for this cause since the run began"),
    Metric("verdicts/<verdict>", "", "components of completions judged so since the last row"),
    Metric(
        "scorer/killed/<cause>",
        "",
        "reward processes and async calls ended, by cause, since the last row",
    ),
    Metric("weights/version", "", "policy_version after the step"),
    Metric(
        "weights/skew_max",
        "versions",
        "newest published version minus the oldest that is served",
    ),
    Metric("weights/publish_s", "s", "longest a publish took since the last step; NaN if none"),
    Metric("weights/pull_s", "s", "longest it took from news of a version to its use"),
    Metric("weights/pause_s", "s", "longest a generator sampled nothing for a new version"),
    Metric("weights/bytes", "bytes", "weights moved between processes since the last step"),
    Metric(
        "weights/copied_bytes",
        "bytes",
        "of a colocated run: policy's weights copied within processes since the last step",
    ),
    Metric("weights/bytes_per_s", "bytes/s", "weights moved over the time of the pulls"),
    Metric("weights/interrupted", "rollouts", "rollouts that a version came in the middle of"),
    Metric("weights/tokens_per_version", "tokens", "trained tokens over versions among them"),
    Metric("weights/probe_diff", "nats", "largest difference from the trainer on a probe"),
    Metric("weights/faults", "", "publishes and pulls that failed since the run began"),
    Metric("ledger/admitted", "groups", "prompts admitted since the run began"),
    Metric("ledger/trained", "groups", "groups trained since the run began"),
    Metric("ledger/filtered", "groups", "groups filtered since the run began"),
    Metric("ledger/dropped", "groups", "groups dropped for any cause since the run began"),
    Metric("ledger/in_flight", "groups", "groups admitted and not yet ended"),
    Metric("time/step_s", "s", "wall time from the last step's end to this one's"),
    Metric("time/generate_s", "s", "time the generators computed in the step"),
    Metric("time/score_s", "s", "time the scorers computed in the step"),
    Metric("time/train_s", "s", "time the trainers computed in the step"),
    Metric("throughput/tokens_per_s", "tokens/s", "tokens trained over the step's wall time"),
    Metric("throughput/groups_per_s", "groups/s", "groups trained over the step's wall time"),
    Metric(
        "memory/<phase>_mb",
        "MB",
        "of a colocated run: most a worker held to generate, or to train, since the last row",
    ),
    Metric("eval/<name>", "", "an evaluation under the step's weights, such as eval/pass_at_1"),
    Metric("eval/interval/<name>", "", "an end of its 95 % interval, such as pass_at_1_low"),
    Metric("eval/source/<source>/<name>", "", "the same of one data_source, as openai~gsm8k"),
    Metric("eval/file/<file>/<name>", "", "the same of one file"),
)
_EXACT = {metric.name: metric for metric in METRICS if not metric.is_pattern}
_PATTERNS = tuple(metric for metric in METRICS if metric.is_pattern)


def metric_for(name: str) -> Metric:
    """The contract's line for a logged name. Raises ValueError, with a hint, if there is none."""
    if name in _EXACT:
        return _EXACT[name]
    for metric in _PATTERNS:
        if metric.matches(name):
            return metric
    close = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"metric {name} is not in the metrics contract{hint}")


def check_row(row: Row) -> None:
    """Raise ValueError if a name of the row is not in the contract or its value has a wrong type.

    Values are numbers (numpy scalars too, not bool), or a Histogram where the contract says so.
    """
    for name, value in row.items():
        wanted = Histogram if metric_for(name).is_histogram else Real
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"metric {name}={value!r}: must be a {wanted.__name__}")


def missing_names(row: Row) -> list[str]:
    """Names without a placeholder that the row does not hold; every run logs all of them."""
    return [name for name in _EXACT if name not in row]


def json_value(value: float | Histogram) -> int | float | dict[str, list[float]] | None:
    """A metric value as JSON: NaN and infinities, which JSON cannot hold, are null."""
    if isinstance(value, Histogram):
        return value.to_json()
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


def read_row(line: Mapping[str, Any]) -> Row:
    """Inverse of `json_value` for the metrics of a line, without those that are null.

    Raises ValueError for a value that is neither a number nor a histogram.
    """
    row: dict[str, float | Histogram] = {}
    for name, value in line.items():
        if name in NO_METRICS or value is None:
            continue
        try:
            row[name] = value if isinstance(value, int | float) else Histogram.from_json(value)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{name}={value!r:.40}: neither a number nor a histogram") from None
    return row


def contract_table() -> str:
    """The contract as a markdown table, for docs/metrics.md."""
    lines = ["| name | unit | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{m.name}` | {m.unit or '-'} | {m.meaning} |" for m in METRICS]
    return "\n".join(lines) + "\n"
