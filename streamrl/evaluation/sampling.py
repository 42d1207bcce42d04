"""How good the policy is on prompts it is not trained on: pass@1, pass@k and mean score.

Runtime-free: the caller says how a prompt is sampled and how its rollouts are scored.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.engines.seeds import rollout_seeds
from streamrl.errors import ConfigError, DeadlineError, RewardError
from streamrl.messages import Array, Columns, Prompt, Rollout

Generate = Callable[[Prompt, Sequence[int]], Awaitable[list[Rollout]]]
Score = Callable[[Prompt, list[Rollout]], Awaitable[Columns]]
MAX_SEED = 2**32 - 1


@dataclass
class EvaluationConfig:
    """When the policy is evaluated, and how.

    every: optimizer steps between evaluations; 0: only those at the start and the end.
    at_start: evaluate before the first step.
    at_end: evaluate after the last step.
    samples: completions per prompt, the k of pass@k.
    temperature: of sampling; 0 takes the likeliest token.
    limit: evaluate the first so many prompts of the file; null: all.
    seed: of sampling; the same weights and seed give the same result.
    pass_score: score from which a completion passes.
    concurrency: prompts under way at once.
    """

    every: int = 0
    at_start: bool = True
    at_end: bool = True
    samples: int = 4
    temperature: float = 1.0
    limit: int | None = None
    seed: int = 0
    pass_score: float = 1.0
    concurrency: int = 64

    def __post_init__(self) -> None:
        for key, least in (("every", 0), ("samples", 1), ("temperature", 0), ("concurrency", 1)):
            if not vars(self)[key] >= least:
                raise ConfigError(f"evaluation.{key}={vars(self)[key]}: must be {least} or more")
        if not math.isfinite(self.temperature):
            raise ConfigError(f"evaluation.temperature={self.temperature}: must be finite")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"evaluation.seed={self.seed}: must be from 0 to {MAX_SEED}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"evaluation.limit={self.limit}: must be 1 or more, or null")

    def is_due(self, step: int, *, num_steps: int) -> bool:
        """Whether to evaluate when `step` of `num_steps` optimizer steps have been made."""
        on_the_way = self.every > 0 and step > 0 and step % self.every == 0
        at_an_end = (self.at_start and step == 0) or (self.at_end and step == num_steps)
        return on_the_way or at_an_end


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of `samples` completions for each of `num_prompts` prompts.

    num_unscored: prompts left out of all figures, as no reward could be computed for them.
    problem: why, for one of those.
    pass_at_1: fraction of all completions that pass; the unbiased estimate for a single try.
    pass_at_k: fraction of prompts of which any completion passes, k = samples.
    mean_at_k: mean score of all completions.
    by_source: the same for the prompts of each data_source.
    """

    num_prompts: int
    samples: int
    pass_at_1: float
    pass_at_k: float
    mean_at_k: float
    num_unscored: int = 0
    problem: str = ""
    by_source: Mapping[str, "EvaluationResult"] = field(default_factory=dict)


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    generate: Generate,
    score: Score,
    config: EvaluationConfig,
    timeout_s: float = 600.0,
    attempts: int = 3,
) -> EvaluationResult:
    """Sample and score the first `config.limit` prompts, config.concurrency of them at once.

    `generate` is given one seed per completion wanted, a function of config.seed and the prompt's
    uid alone, so that the result does not depend on what runs beside what. A RewardError of
    `score` leaves its prompt out after so many attempts; if that happens to all, it is raised.
    Raises what else `generate` or `score` raises, and DeadlineError if an attempt takes longer
    than `timeout_s`; nothing goes on in the background then.
    """
    chosen = list(prompts[: config.limit])
    if not chosen:
        raise ValueError("evaluation: no prompts")
    slots = asyncio.Semaphore(config.concurrency)

    async def attempt(prompt: Prompt) -> Array:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                seeds = rollout_seeds(config.seed, prompt.uid, config.samples)
                rollouts = await generate(prompt, seeds)
                columns = await score(prompt, rollouts)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineError(
                f"evaluation of uid {prompt.uid}: no scores in {timeout_s:g} s"
            ) from error
        if columns["scores"].shape != (config.samples,):
            raise ValueError(
                f"evaluation of uid {prompt.uid}: {columns['scores'].shape} scores, "
                f"wanted {config.samples}"
            )
        return columns["scores"]

    async def scores_of(prompt: Prompt) -> Array | RewardError:
        async with slots:
            for _ in range(attempts):
                try:
                    return await attempt(prompt)
                except RewardError as error:
                    problem = error
            return problem

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scores_of(prompt)) for prompt in chosen]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return _result(chosen, [task.result() for task in tasks], config.pass_score)


def _result(
    prompts: Sequence[Prompt], outcomes: Sequence[Array | RewardError], pass_score: float
) -> EvaluationResult:
    """The figures over the prompts that have scores, in all and by source."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    scored = [not isinstance(outcome, RewardError) for outcome in outcomes]
    if not any(scored):
        raise problems[0]
    scores = np.stack([o for o in outcomes if not isinstance(o, RewardError)])
    sources = np.array([p.data_source for p, kept in zip(prompts, scored, strict=True) if kept])
    by_source = {
        str(source): _figures(scores[sources == source], pass_score)
        for source in np.unique(sources)
    }
    return replace(
        _figures(scores, pass_score),
        by_source=by_source,
        num_unscored=len(problems),
        problem=str(problems[0]) if problems else "",
    )


def _figures(scores: Array, pass_score: float) -> EvaluationResult:
    """What [prompts, samples] scores come to."""
    passed = scores >= pass_score
    return EvaluationResult(
        num_prompts=scores.shape[0],
        samples=scores.shape[1],
        pass_at_1=float(passed.mean()),
        pass_at_k=float(passed.any(axis=1).mean()),
        mean_at_k=float(scores.mean(dtype=np.float64)),
    )
