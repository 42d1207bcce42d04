"""What the scores of an evaluation come to: pass@k, mean@k, maj@k, and how sure of them one can be.

All scores are [prompts, samples]. The completions of a prompt are alike, so that the prompts, not
the completions, are the independent observations: intervals are clustered by prompt.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

import numpy as np

from streamrl.messages import Array

ConfidenceInterval = tuple[float, float]

_NORMAL_QUANTILE_95 = 1.959964
"""The normal quantile that 95 % lie within."""
_RESERVED_SEGMENTS = {"": "none", "none": "%6Eone"}
"""What metrics call the source of rows that have none, and a source that is called so."""


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of `samples` completions for each of `num_prompts` prompts; intervals hold 95 %.

    pass_at: for k = 1, 2, 4 and so on up to `samples`, the chance that one of k tries passes.
    mean_at_k: mean score of all completions, k = samples.
    maj_at_k: chance that the answer most completions give passes; None if answers are not told.
    pass_at_1_interval: of pass_at[1].
    mean_at_k_interval: of mean_at_k; None if there is one prompt only.
    num_unscored: prompts left out of all figures, as no reward could be computed for them.
    problem: why, for one of those.
    by_source, by_file: the same for the prompts of each data_source, and of each file by name.
    """

    num_prompts: int
    samples: int
    pass_at: Mapping[int, float]
    mean_at_k: float
    maj_at_k: float | None
    pass_at_1_interval: ConfidenceInterval
    mean_at_k_interval: ConfidenceInterval | None
    num_unscored: int = 0
    unscored_reason: str = ""
    by_source: Mapping[str, "EvaluationResult"] = field(default_factory=dict)
    by_file: Mapping[str, "EvaluationResult"] = field(default_factory=dict)

    @property
    def pass_at_1(self) -> float:
        """Fraction of all completions that pass."""
        return self.pass_at[1]

    @property
    def pass_at_k(self) -> float:
        """Fraction of prompts of which any completion passes, k = samples."""
        return self.pass_at[self.samples]

    def to_metrics(self) -> dict[str, float]:
        """The figures under the names of the metrics contract; those of parts if there are two."""
        row = {"eval/pass_at_1": self.pass_at_1, "eval/pass_at_k": self.pass_at_k}
        row |= {f"eval/pass_at_{k}": p for k, p in self.pass_at.items() if k < self.samples}
        row |= self._mean_metrics("eval/")
        intervals = {"pass_at_1": self.pass_at_1_interval, "mean_at_k": self.mean_at_k_interval}
        for name, interval in intervals.items():
            for end, value in zip(("low", "high"), interval or (), strict=False):
                row[f"eval/interval/{name}_{end}"] = value
        for kind, parts in (("source", self.by_source), ("file", self.by_file)):
            for name, part in parts.items() if len(parts) > 1 else ():
                prefix = f"eval/{kind}/{to_metric_segment(name)}/"
                row |= {f"{prefix}pass_at_1": part.pass_at_1, f"{prefix}pass_at_k": part.pass_at_k}
                row |= part._mean_metrics(prefix)
        return row

    def _mean_metrics(self, prefix: str) -> dict[str, float]:
        maj = {} if self.maj_at_k is None else {f"{prefix}maj_at_k": self.maj_at_k}
        return {f"{prefix}mean_at_k": self.mean_at_k, **maj}


def to_metric_segment(name: str) -> str:
    """Any name as one segment of a metric's name; two of them never have the same.

    Letters, digits and `_ . -` stand for themselves, `~` for a slash, `none` for no name; anything
    else, and the name none itself, is percent-encoded.
    """
    if name in _RESERVED_SEGMENTS:
        return _RESERVED_SEGMENTS[name]
    plain = re.sub(r"[^\w./-]", lambda found: quote(found[0], "", errors="surrogatepass"), name)
    return plain.replace("~", "%7E").replace("/", "~")


def summarize_scores(
    scores: Array, answers: Array | None, *, pass_score: float
) -> EvaluationResult:
    """The figures of scores [prompts, samples].

    `answers`, int64 of the same shape, has a number for each completion that is the same for equal
    answers, and 0 where there is no answer.
    """
    num_prompts, samples = scores.shape
    passed = scores >= pass_score
    ks = [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]
    means = scores.mean(axis=1, dtype=np.float64)
    return EvaluationResult(
        num_prompts=num_prompts,
        samples=samples,
        pass_at={k: compute_pass_at_k(passed, k) for k in ks},
        mean_at_k=float(means.mean()),
        maj_at_k=None if answers is None else compute_maj_at_k(passed, answers),
        pass_at_1_interval=compute_fraction_interval(passed),
        mean_at_k_interval=compute_mean_interval(means),
    )


def compute_pass_at_k(passed: Array, k: int) -> float:
    """Chance that one of k tries passes, for bool [prompts, samples]; k is at most samples.

    Without bias: over the ways to take k of the n completions of a prompt, c of which pass, 1 -
    C(n - c, k) / C(n, k); the mean over prompts (Chen et al. 2021, arXiv:2107.03374, eq. 1).
    """
    samples = passed.shape[1]
    ways = math.comb(samples, k) * len(passed)
    failing = sum(math.comb(samples - int(c), k) for c in passed.sum(axis=1))
    return (ways - failing) / ways


def compute_maj_at_k(passed: Array, answers: Array) -> float:
    """Chance that a prompt's majority answer passes, for bool and int64 [prompts, samples].

    Completions without an answer (0) have no vote; of answers with equally many votes, each is
    taken equally often. A prompt without any answer fails (Wang et al. 2022, arXiv:2203.11171).
    """
    chances = [_majority_pass_rate(*row) for row in zip(passed, answers, strict=True)]
    return math.fsum(chances) / len(chances)


def _majority_pass_rate(passed: Array, answers: Array) -> float:
    votes = Counter(answers[answers != 0].tolist())
    most = max(votes.values(), default=0)
    tied = [answer for answer, count in votes.items() if count == most]
    return math.fsum(passed[answers == a].mean() for a in tied) / max(len(tied), 1)


def compute_mean_interval(means: Array) -> ConfidenceInterval | None:
    """95 % interval of the mean of `means` [prompts], each the mean of a prompt's completions.

    mean +- 1.96 SE, SE^2 = sum (m_i - mean)^2 / (n (n - 1)): the standard error clustered by prompt
    where all prompts have equally many completions (Miller 2024, arXiv:2411.00640).
    """
    if len(means) == 1:
        return None
    half = _NORMAL_QUANTILE_95 * float(means.std(ddof=1)) / math.sqrt(len(means))
    return float(means.mean()) - half, float(means.mean()) + half


def compute_fraction_interval(passed: Array) -> ConfidenceInterval:
    """95 % interval of the fraction of bool [prompts, samples] that is true, within 0 and 1.

    Wilson's score interval at the effective sample size n* = p (1 - p) / SE^2, SE as in
    `compute_mean_interval`, and at most all completions; where all pass or none does, or there is
    but one prompt, n* is the number of prompts (Wilson 1927; Korn and Graubard 1998).
    """
    p, count = float(passed.mean()), float(len(passed))
    if 0 < p < 1 and len(passed) > 1:
        variance = float(passed.mean(axis=1).var(ddof=1)) / len(passed)
        count = min(p * (1 - p) / variance, passed.size) if variance else float(passed.size)
    scale = 1 + _NORMAL_QUANTILE_95**2 / count
    center = (p + _NORMAL_QUANTILE_95**2 / (2 * count)) / scale
    half = (
        _NORMAL_QUANTILE_95
        / scale
        * math.sqrt(p * (1 - p) / count + (_NORMAL_QUANTILE_95 / (2 * count)) ** 2)
    )
    return max(center - half, 0.0), min(center + half, 1.0)
