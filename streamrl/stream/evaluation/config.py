"""Config section `evaluation`: schedule and sampling of evaluations."""

import math
from dataclasses import dataclass

from streamrl.engines.generator_config import SamplingSettings
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import check_minimums

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
    limit: number of prompts evaluated per file, from its beginning; null: all prompts.
    seed: sampling seed; the same weights and seed give the same result.
    pass_score: lowest score of a completion that passes.
    concurrency: prompts in flight.
    """

    every: int = 0
    at_start: bool = True
    at_end: bool = True
    samples: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    limit: int | None = None
    seed: int = 0
    pass_score: float = 1.0
    concurrency: int = 64

    def __post_init__(self) -> None:
        minimums = {"every": 0, "samples": 1, "temperature": 0, "concurrency": 1, "top_k": -1}
        check_minimums(self, {**minimums, "limit": 1}, section="evaluation.")
        if not math.isfinite(self.temperature):
            raise ConfigError(f"evaluation.temperature={self.temperature}: must be finite")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"evaluation.top_p={self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"evaluation.seed={self.seed}: must be from 0 to {MAX_SEED}")

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(self.temperature, self.top_p, max(self.top_k, 0))

    def is_due(self, step: int, *, num_steps: int) -> bool:
        is_periodic = self.every > 0 and step > 0 and step % self.every == 0
        is_endpoint = (self.at_start and step == 0) or (self.at_end and step == num_steps)
        return is_periodic or is_endpoint
