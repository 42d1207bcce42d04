"""Config section `evaluation`: schedule and sampling of evaluations."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from streamrl.engines.generator_config import SamplingSettings
from streamrl.files.typed_settings import above, at_least

MAX_SEED = 2**32 - 1


@dataclass
class EvaluationConfig:
    """Schedule and sampling of evaluations.

    every: training steps between evaluations; 0 evaluates at the start and the end only.
    at_start: evaluate before the first step.
    at_end: evaluate after the last step.
    samples: completions per prompt: k of mean@k and maj@k, the largest k of pass@k.
    temperature: sampling temperature; 0 decodes greedily.
    top_p: nucleus sampling: sample from the smallest set of tokens with this total probability.
    top_k: sample from the k likeliest tokens; 0 or -1: from all tokens.
    unique: evaluate a prompt once that several rows of a file repeat. For benchmarks that hold each
        problem many times: by `samples` instead, pass@k and intervals are those of problems. A row
        repeats another of equal prompt, ground truth and data source. Not with environments.
    limit: number of prompts evaluated per file, from its beginning; null: all prompts.
    seed: sampling seed; the same weights and seed give the same result.
    pass_score: lowest score of a completion that passes.
    coverage: least pass@k of the initial policy on 64 training prompts, sampled as in training,
        with k = algorithm.group_size; below it the run ends before its first step, since groups
        without a right rollout teach nothing. null: not measured.
    """

    coverage_prompts: ClassVar[int] = 64

    concurrency: ClassVar[int] = 64
    """Prompts in flight."""
    every: Annotated[int, at_least(0)] = 0
    at_start: bool = True
    at_end: bool = True
    samples: Annotated[int, at_least(1)] = 4
    temperature: Annotated[float, at_least(0)] = 1.0
    top_p: Annotated[float, above(0, 1)] = 1.0
    top_k: Annotated[int, at_least(-1)] = 0
    unique: bool = False
    limit: Annotated[int | None, at_least(1)] = None
    seed: Annotated[int, at_least(0, MAX_SEED)] = 0
    pass_score: float = 1.0
    coverage: Annotated[float | None, at_least(0, 1)] = None

    @property
    def max_rows(self) -> int | None:
        """Number of rows of a file that are read; None: all, as repeated ones do not count."""
        return None if self.unique else self.limit

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(self.temperature, self.top_p, max(self.top_k, 0))

    def is_due(self, step: int, *, num_steps: int) -> bool:
        is_periodic = self.every > 0 and step > 0 and step % self.every == 0
        is_endpoint = (self.at_start and step == 0) or (self.at_end and step == num_steps)
        return is_periodic or is_endpoint
