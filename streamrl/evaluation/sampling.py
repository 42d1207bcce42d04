"""Prompts sampled and scored for an evaluation: the caller says how each is done."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.engines.seeds import rollout_seeds
from streamrl.errors import DeadlineError, RewardError
from streamrl.evaluation.config import EvaluationConfig
from streamrl.evaluation.figures import EvaluationResult, figures
from streamrl.messages import Array, Columns, Prompt, Rollout

Generate = Callable[[Prompt, Sequence[int]], Awaitable[list[Rollout]]]
Score = Callable[[Prompt, list[Rollout]], Awaitable[Columns]]


@dataclass(frozen=True)
class _Scored:
    """A prompt's scores [samples], and its completions' answers, if the scorer tells them."""

    scores: Array
    answers: Array | None


async def evaluate(
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    generate: Generate,
    score: Score,
    config: EvaluationConfig,
    timeout_s: float = 600.0,
    attempts: int = 3,
) -> EvaluationResult:
    """Sample and score the first `config.limit` prompts of each file, by its name.

    config.concurrency prompts are under way at once. `score` gives column `scores`, and `answers`
    where it knows the completions' answers: numbers that are equal for equal ones, 0 for none.

    `generate` is given one seed per completion wanted, a function of config.seed and the prompt's
    uid alone, so that the result does not depend on what runs beside what. A RewardError of
    `score` leaves its prompt out after so many attempts; if that happens to all, it is raised.
    Raises what else `generate` or `score` raises, and DeadlineError if an attempt takes longer
    than `timeout_s`; nothing goes on in the background then.
    """
    chosen = [(name, one) for name, file in prompts.items() for one in file[: config.limit]]
    if not chosen:
        raise ValueError("evaluation: no prompts")
    slots = asyncio.Semaphore(config.concurrency)

    async def attempt(prompt: Prompt) -> _Scored:
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
        return _scored(columns, prompt.uid, config.samples)

    async def scores_of(prompt: Prompt) -> _Scored | RewardError:
        async with slots:
            for _ in range(attempts):
                try:
                    return await attempt(prompt)
                except RewardError as error:
                    problem = error
            return problem

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scores_of(prompt)) for _, prompt in chosen]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return _result(chosen, [task.result() for task in tasks], config.pass_score)


def _scored(columns: Columns, uid: str, samples: int) -> _Scored:
    for name in ("scores", "answers"):
        if name in columns and columns[name].shape != (samples,):
            raise ValueError(
                f"evaluation of uid {uid}: {columns[name].shape} {name}, wanted {samples}"
            )
    return _Scored(columns["scores"], columns.get("answers"))


def _result(
    chosen: Sequence[tuple[str, Prompt]],
    outcomes: Sequence[_Scored | RewardError],
    pass_score: float,
) -> EvaluationResult:
    """The figures over the prompts that have scores, in all, by source and by file."""
    problems = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    found = [
        (name, prompt.data_source, outcome)
        for (name, prompt), outcome in zip(chosen, outcomes, strict=True)
        if isinstance(outcome, _Scored)
    ]
    if not found:
        raise problems[0]

    def of(rows: Sequence[_Scored]) -> EvaluationResult:
        told = [row.answers for row in rows if row.answers is not None]
        # Of some prompts only, a majority would be another measure than that of the rest.
        answers = np.stack(told) if len(told) == len(rows) else None
        return figures(np.stack([row.scores for row in rows]), answers, pass_score=pass_score)

    return replace(
        of([row for _, _, row in found]),
        by_source={
            source: of([row for _, of_row, row in found if of_row == source])
            for source in sorted({source for _, source, _ in found})
        },
        by_file={
            name: of([row for of_row, _, row in found if of_row == name])
            for name in dict.fromkeys(name for name, _, _ in found)
        },
        num_unscored=len(problems),
        problem=str(problems[0]) if problems else "",
    )
