"""Prompts sampled and scored for an evaluation: the caller says how each is done."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import numpy as np

from streamrl.data.rollout_seeds import make_rollout_seeds
from streamrl.errors import DeadlineError, RewardError
from streamrl.evaluation.config import EvaluationConfig
from streamrl.evaluation.metrics import EvaluationResult, summarize_scores
from streamrl.messages import Array, Columns, Prompt, Rollout

GenerateFn = Callable[[Prompt, Sequence[int]], Awaitable[list[Rollout]]]
ScoreFn = Callable[[Prompt, list[Rollout]], Awaitable[Columns]]
#: A deadline after so many seconds.
DeadlineFactory = Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]]


@dataclass(frozen=True)
class _PromptScores:
    """A prompt's scores [samples] and its completions' answers, all 0 if the scorer tells none."""

    data_source: str
    scores: Array
    answers: Array


async def evaluate_policy(
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    generate: GenerateFn,
    score: ScoreFn,
    config: EvaluationConfig,
    timeout_s: float = 600.0,
    patience: DeadlineFactory = asyncio.timeout,
) -> EvaluationResult:
    """Sample and score the first `config.limit` prompts of each file, by its name.

    config.concurrency prompts are under way at once. `score` gives column `scores`, and `answers`
    where it knows the completions' answers: numbers that are equal for equal ones, 0 for none. If
    no completion of a data_source has an answer, its reward tells none: there is no majority.

    `generate` is given one seed per completion wanted, a function of config.seed and the prompt's
    uid alone, so that the result does not depend on what runs beside what. A RewardError of
    `score` leaves its prompt out, and is raised if that happens to all: a reward has tried often
    enough itself. Raises what else `generate` or `score` raises, and DeadlineError if a prompt
    takes longer than `timeout_s`, which is counted as `patience` counts; nothing goes on in the
    background then.
    """
    chosen = [(name, one) for name, file in prompts.items() for one in file[: config.limit]]
    if not chosen:
        raise ValueError("evaluation: no prompts")
    slots = asyncio.Semaphore(config.concurrency)

    async def sampled(prompt: Prompt) -> _PromptScores:
        try:
            async with patience(timeout_s) as deadline:
                seeds = make_rollout_seeds(config.seed, prompt.uid, config.samples)
                rollouts = await generate(prompt, seeds)
                columns = await score(prompt, rollouts)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineError(
                f"evaluation of uid {prompt.uid}: no scores in {timeout_s:g} s"
            ) from error
        return _to_prompt_scores(columns, prompt, config.samples)

    async def scores_of(prompt: Prompt) -> _PromptScores | RewardError:
        async with slots:
            try:
                return await sampled(prompt)
            except RewardError as error:
                return error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scores_of(prompt)) for _, prompt in chosen]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return _summarize_outcomes(chosen, [task.result() for task in tasks], config.pass_score)


def _to_prompt_scores(columns: Columns, prompt: Prompt, samples: int) -> _PromptScores:
    found = {"answers": np.zeros(samples, np.int64), **columns}
    for name in ("scores", "answers"):
        if found[name].shape != (samples,):
            raise ValueError(
                f"evaluation of uid {prompt.uid}: {found[name].shape} {name}, wanted {samples}"
            )
    return _PromptScores(prompt.data_source, found["scores"], found["answers"])


def _summarize_outcomes(
    chosen: Sequence[tuple[str, Prompt]],
    outcomes: Sequence[_PromptScores | RewardError],
    pass_score: float,
) -> EvaluationResult:
    """The figures over the prompts that have scores, in all, by source and by file."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    found = [
        (name, outcome)
        for (name, _), outcome in zip(chosen, outcomes, strict=True)
        if isinstance(outcome, _PromptScores)
    ]
    if not found:
        raise problems[0]
    return replace(
        _summarize_prompts([row for _, row in found], pass_score),
        by_source={
            source: _summarize_prompts(
                [row for _, row in found if row.data_source == source], pass_score
            )
            for source in sorted({row.data_source for _, row in found})
        },
        by_file={
            name: _summarize_prompts([row for file, row in found if file == name], pass_score)
            for name in dict.fromkeys(name for name, _ in found)
        },
        num_unscored=len(problems),
        unscored_reason=str(problems[0]) if problems else "",
    )


def _summarize_prompts(rows: Sequence[_PromptScores], pass_score: float) -> EvaluationResult:
    sources = {row.data_source for row in rows}
    telling = {row.data_source for row in rows if row.answers.any()}
    # Of some sources only, a majority would be another measure than that of the rest.
    answers = np.stack([row.answers for row in rows]) if telling == sources else None
    return summarize_scores(np.stack([row.scores for row in rows]), answers, pass_score=pass_score)
