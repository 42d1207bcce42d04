"""The settings of a run's evaluations."""

import math
from dataclasses import dataclass

from streamrl.engines.generator_config import SamplingSettings
from streamrl.errors import ConfigError

MAX_SEED = 2**32 - 1


@dataclass
class EvaluationConfig:
    """When the policy is evaluated, and how.

    every: optimizer steps between evaluations; 0: only those at the start and the end.
    at_start: evaluate before the first step.
    at_end: evaluate after the last step.
    samples: completions per prompt, the k of mean@k and maj@k and the largest of pass@k.
    temperature: of sampling; 0 takes the likeliest token.
    top_p: draw among the fewest likeliest tokens that have this probability together.
    top_k: draw among so many likeliest tokens; 0 or -1: all.
    limit: evaluate the first so many prompts of each file; null: all.
    seed: of sampling; the same weights and seed give the same result.
    pass_score: score from which a completion passes.
    concurrency: prompts under way at once.
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
        for key, least in (
            ("every", 0),
            ("samples", 1),
            ("temperature", 0),
            ("concurrency", 1),
            ("top_k", -1),
        ):
            if not vars(self)[key] >= least:
                raise ConfigError(f"evaluation.{key}={vars(self)[key]}: must be {least} or more")
        if not math.isfinite(self.temperature):
            raise ConfigError(f"evaluation.temperature={self.temperature}: must be finite")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"evaluation.top_p={self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"evaluation.seed={self.seed}: must be from 0 to {MAX_SEED}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"evaluation.limit={self.limit}: must be 1 or more, or null")

    @property
    def sampling(self) -> SamplingSettings:
        """How completions are sampled."""
        return SamplingSettings(self.temperature, self.top_p, max(self.top_k, 0))

    def is_due(self, step: int, *, num_steps: int) -> bool:
        """Whether to evaluate when `step` of `num_steps` optimizer steps have been made."""
        on_the_way = self.every > 0 and step > 0 and step % self.every == 0
        at_an_end = (self.at_start and step == 0) or (self.at_end and step == num_steps)
        return on_the_way or at_an_end
