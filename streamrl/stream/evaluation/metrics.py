"""Metrics of an evaluation: pass@k, mean@k, maj@k and their 95 % confidence intervals.

Scores are an array [n] per prompt, with n = samples unless some completions of the prompt have no
score. Completions of the same prompt are correlated; only prompts are independent observations.
Confidence intervals are therefore clustered by prompt.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from urllib.parse import quote

import numpy as np

from streamrl.messages import Array

ConfidenceInterval = tuple[float, float]

_NORMAL_QUANTILE_95 = 1.959964
_RESERVED_SEGMENTS = {"": "none", "none": "%6Eone"}
"""Prompts without a data_source count as "none", so a data_source called "none" is escaped."""


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of `num_prompts` prompts with `samples` completions each; intervals cover 95 %.

    pass_at: probability that at least one of k completions passes, k = 1, 2, 4, ..., `samples`; NaN
        if no prompt has k scored completions.
    mean_at_k: mean score of all completions, k = samples.
    maj_at_k: probability that the majority answer passes; None if the reward extracts no answers.
    pass_at_1_interval: confidence interval of pass_at[1].
    mean_at_k_interval: confidence interval of mean_at_k; None for a single prompt.
    means: means of reward components and of episodes (`EpisodeTotals`) by metric name.
    num_unscored: prompts excluded from all metrics because their reward or environment failed.
    num_unscored_samples: further samples left out, of prompts with other samples.
    unscored_reason: first error that excluded a prompt or sample.
    by_source, by_file: results per data_source and per file name.
    """

    num_prompts: int
    samples: int
    pass_at: Mapping[int, float]
    mean_at_k: float
    maj_at_k: float | None
    pass_at_1_interval: ConfidenceInterval
    mean_at_k_interval: ConfidenceInterval | None
    means: Mapping[str, float] = field(default_factory=dict)
    num_unscored: int = 0
    num_unscored_samples: int = 0
    unscored_reason: str = ""
    by_source: Mapping[str, "EvaluationResult"] = field(default_factory=dict)
    by_file: Mapping[str, "EvaluationResult"] = field(default_factory=dict)

    @property
    def pass_at_1(self) -> float:
        return self.pass_at[1]

    @property
    def pass_at_k(self) -> float:
        """Fraction of prompts with at least one passing completion, k = samples."""
        return self.pass_at[self.samples]

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics by name (docs/metrics.md), and per data_source or file if several."""
        row = {"eval/pass_at_1": self.pass_at_1, "eval/pass_at_k": self.pass_at_k}
        row["eval/scored"] = self.num_prompts * self.samples - self.num_unscored_samples
        row["eval/unscored"] = self.num_unscored * self.samples + self.num_unscored_samples
        row |= {f"eval/pass_at_{k}": p for k, p in self.pass_at.items() if k < self.samples}
        row |= self._list_mean_metrics("eval/")
        intervals = {"pass_at_1": self.pass_at_1_interval, "mean_at_k": self.mean_at_k_interval}
        for name, interval in intervals.items():
            for end, value in zip(("low", "high"), interval or (), strict=False):
                row[f"eval/interval/{name}_{end}"] = value
        for kind, parts in (("source", self.by_source), ("file", self.by_file)):
            for name, part in parts.items() if len(parts) > 1 else ():
                prefix = f"eval/{kind}/{to_metric_segment(name)}/"
                row |= {f"{prefix}pass_at_1": part.pass_at_1, f"{prefix}pass_at_k": part.pass_at_k}
                row |= part._list_mean_metrics(prefix)
        return row

    def _list_mean_metrics(self, prefix: str) -> dict[str, float]:
        maj = {} if self.maj_at_k is None else {"maj_at_k": self.maj_at_k}
        means = {"mean_at_k": self.mean_at_k, **maj, **self.means}
        return {f"{prefix}{name}": mean for name, mean in means.items()}


def to_metric_segment(name: str) -> str:
    """Encode a name as a segment of a metric name, the text between two slashes.

    Distinct names give distinct segments. Letters, digits and `_ . -` are kept, a slash becomes
    `~`, the empty name `none`. Every other character, and the name "none" itself, is
    percent-encoded.
    """
    if name in _RESERVED_SEGMENTS:
        return _RESERVED_SEGMENTS[name]
    plain = re.sub(r"[^\w./-]", lambda match: quote(match[0], "", errors="surrogatepass"), name)
    return plain.replace("~", "%7E").replace("/", "~")


def compute_evaluation_result(
    scores: Collection[Array],
    answers: Collection[Array] | None,
    *,
    samples: int,
    pass_score: float,
) -> EvaluationResult:
    """Compute all metrics of an evaluation.

    scores: float [n] per prompt, n <= `samples`.
    answers: int64 [n] per prompt, an id per distinct answer; 0 marks a missing answer. None omits
        maj@k.
    samples: completions sampled per prompt.
    pass_score: lowest score of a completion that passes.
    """
    passed = [row >= pass_score for row in scores]
    ks = [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]
    means = np.array([row.mean(dtype=np.float64) for row in scores])
    return EvaluationResult(
        num_prompts=len(scores),
        samples=samples,
        pass_at={k: compute_pass_at_k(passed, k) for k in ks},
        mean_at_k=float(means.mean()),
        maj_at_k=None if answers is None else compute_maj_at_k(passed, answers),
        pass_at_1_interval=compute_fraction_interval(passed),
        mean_at_k_interval=compute_mean_interval(means),
    )


def compute_pass_at_k(passed: Collection[Array], k: int) -> float:
    """Return the unbiased estimate of pass@k, averaged over prompts; NaN if none has k completions.

    passed: bool [n] per prompt; prompts with n < k allow no estimate and are left out.

    For n completions of a prompt, c of which pass: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021,
    arXiv:2107.03374, eq. 1). Example: n = 4, c = 1, k = 2 gives 1 - 3/6 = 0.5.
    """
    prompts = Counter((len(row), int(row.sum())) for row in passed if len(row) >= k)
    if not prompts:
        return math.nan
    # Fractions: the conversion at the end is the only rounding.
    failing = sum(
        count * Fraction(math.comb(n - c, k), math.comb(n, k)) for (n, c), count in prompts.items()
    )
    return float(1 - failing / prompts.total())


def compute_maj_at_k(passed: Collection[Array], answers: Collection[Array]) -> float:
    """Return maj@k (self-consistency, Wang et al. 2022, arXiv:2203.11171), averaged over prompts.

    passed: bool [n] per prompt.
    answers: int64 [n] per prompt, an id per distinct answer; 0 marks a missing answer.

    Completions without an answer do not vote. Tied answers count with equal weight. A prompt
    without answers fails.
    """
    pass_rates = [_compute_majority_pass_rate(*row) for row in zip(passed, answers, strict=True)]
    return math.fsum(pass_rates) / len(pass_rates)


def _compute_majority_pass_rate(passed: Array, answers: Array) -> float:
    """Return the pass rate of a prompt's most frequent answer; tied answers count equally."""
    votes = Counter(answers[answers != 0].tolist())
    most = max(votes.values(), default=0)
    tied = [answer for answer, count in votes.items() if count == most]
    return math.fsum(passed[answers == a].mean() for a in tied) / max(len(tied), 1)


def compute_mean_interval(means: Array) -> ConfidenceInterval | None:
    """Return the 95 % confidence interval of the mean score; None for a single prompt.

    means: float [prompts], the mean score m_i of each prompt's completions.

    For n prompts the interval is mean +- 1.96 SE with SE^2 = sum (m_i - mean)^2 / (n (n - 1)), the
    standard error clustered by prompt for equal numbers of completions (Miller 2024,
    arXiv:2411.00640). Completions without a score make the numbers slightly unequal.
    """
    if len(means) == 1:
        return None
    half = _NORMAL_QUANTILE_95 * float(means.std(ddof=1)) / math.sqrt(len(means))
    return float(means.mean()) - half, float(means.mean()) + half


def compute_fraction_interval(passed: Collection[Array]) -> ConfidenceInterval:
    """Return the 95 % confidence interval of the fraction of completions that pass, within [0, 1].

    passed: bool [n] per prompt.

    Wilson's score interval for the fraction p at the effective sample size n* = p (1 - p) / SE^2,
    with the standard error SE of `compute_mean_interval` (Wilson 1927; Korn and Graubard 1998). n*
    is at most the number of completions. For p = 0, for p = 1 and for a single prompt, n* is the
    number of prompts.
    """
    means = np.array([row.mean() for row in passed])
    p, count = float(means.mean()), float(len(means))
    if 0 < p < 1 and len(means) > 1:
        variance, size = float(means.var(ddof=1)) / len(means), float(sum(map(len, passed)))
        count = min(p * (1 - p) / variance, size) if variance else size
    scale = 1 + _NORMAL_QUANTILE_95**2 / count
    center = (p + _NORMAL_QUANTILE_95**2 / (2 * count)) / scale
    half = (
        _NORMAL_QUANTILE_95
        / scale
        * math.sqrt(p * (1 - p) / count + (_NORMAL_QUANTILE_95 / (2 * count)) ** 2)
    )
    return max(center - half, 0.0), min(center + half, 1.0)
