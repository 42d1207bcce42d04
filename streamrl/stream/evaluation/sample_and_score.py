"""Evaluation loop: sample completions of the prompts and score them by the caller's functions."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Self

import numpy as np

from streamrl.errors import EpisodeError, RewardError
from streamrl.messages import (
    TRUNCATIONS,
    Array,
    Columns,
    FinishReason,
    Prompt,
    count_samples,
    find_first_samples,
    is_component_column,
    make_rollout_seeds,
)
from streamrl.stream.evaluation.config import EvaluationConfig
from streamrl.stream.evaluation.metrics import EvaluationResult, compute_evaluation_result
from streamrl.user_code.concurrent_calls import map_concurrently


@dataclass(frozen=True)
class EpisodeTotals:
    """Totals over episodes; `sum` of totals and `EpisodeTotals()` adds them up.

    truncated: episodes that ended at a limit of turns or tokens. timeouts: at the limit of time.
    """

    episodes: int = 0
    turns: int = 0
    calls: int = 0
    invalid_calls: int = 0
    truncated: int = 0
    timeouts: int = 0

    @classmethod
    def from_columns(cls, columns: Columns) -> Self:
        """Compute the totals of a prompt's rollouts; all are 0 for completions."""
        if "num_turns" not in columns:
            return cls()
        firsts = find_first_samples(count_samples(columns))
        reasons = columns["finish_reason"][firsts]
        return cls(
            episodes=len(reasons),
            turns=int(columns["num_turns"].sum()),
            calls=int(columns["num_calls"][firsts].sum()),
            invalid_calls=int(columns["num_invalid_calls"][firsts].sum()),
            truncated=int(np.isin(reasons, [reason.value for reason in TRUNCATIONS]).sum()),
            timeouts=int((reasons == FinishReason.TIMEOUT.value).sum()),
        )

    def __add__(self, other: "EpisodeTotals") -> "EpisodeTotals":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return EpisodeTotals(*(mine + others for mine, others in pairs))

    def compute_means(self) -> dict[str, float]:
        """Return the means by metric name, as in `eval/turns`; {} without episodes.

        Without a tool call there is no `malformed_frac`.
        """
        if not self.episodes:
            return {}
        means = {
            "turns": self.turns / self.episodes,
            "calls": self.calls / self.episodes,
            "truncated_frac": self.truncated / self.episodes,
            "timeout_frac": self.timeouts / self.episodes,
        }
        if self.calls:
            means["malformed_frac"] = self.invalid_calls / self.calls
        return means


@dataclass(frozen=True)
class SampledPrompt:
    """Rollouts of an evaluation prompt: ROLLOUT_COLUMNS, and EPISODE_COLUMNS of episodes.

    failure: error of the first sample that was left out; "" if none was.
    """

    columns: Columns
    failure: str = ""


GenerateFn = Callable[[Prompt, Sequence[int]], Awaitable[SampledPrompt]]
ScoreFn = Callable[[Prompt, Columns], Awaitable[Columns]]


@dataclass(frozen=True)
class _PromptScores:
    """Scores and answer ids of a prompt's n completions, shape [n] each; id 0: no answer.

    components: scores of each reward by column name, [n]; NaN where it abstains.
    failure: error of the first sample that was left out; "" if none was.
    """

    data_source: str
    scores: Array
    answers: Array
    components: Columns
    episodes: EpisodeTotals
    failure: str


async def evaluate_policy(
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    generate: GenerateFn,
    score: ScoreFn,
    config: EvaluationConfig,
) -> EvaluationResult:
    """Sample and score the first `config.limit` prompts of each file; return all metrics.

    With `config.unique` a prompt that repeats an earlier one of its file is left out.

    prompts: prompts by file name; config.concurrency prompts are in flight at a time.
    generate: samples a rollout per seed, in the order of the seeds; episodes whose environment
        failed may be missing. Seeds depend on config.seed and the prompt's uid only, so the result
        does not depend on scheduling.
    score: returns column `scores`, and `answers` (an id per distinct answer, 0 for a missing
        answer) if the reward extracts answers. maj@k needs answers from every data_source.

    No prompt has a deadline: a long completion may take any time, and `generate` and `score` bound
    their waits.

    A RewardError of `score` or an EpisodeError of `generate` excludes the prompt: rewards and
    environments retry internally. If every prompt fails, an error of the first one's type is raised
    with its text. Raises every other error of `generate` and `score`; remaining tasks are
    cancelled first.
    """
    files = {
        name: _drop_repeated(file) if config.unique else file for name, file in prompts.items()
    }
    chosen = [(name, prompt) for name, file in files.items() for prompt in file[: config.limit]]
    if not chosen:
        raise ValueError("evaluation: no prompts")

    async def sample_or_error(prompt: Prompt) -> _PromptScores | RewardError | EpisodeError:
        seeds = make_rollout_seeds(config.seed, prompt.uid, config.samples)
        try:
            sampled = await generate(prompt, seeds)
            scores = await score(prompt, sampled.columns)
        except (RewardError, EpisodeError) as error:
            return error
        return _to_prompt_scores(scores, prompt, sampled)

    prompts_in_order = [prompt for _, prompt in chosen]
    outcomes = await map_concurrently(sample_or_error, prompts_in_order, most=config.concurrency)
    return _summarize_outcomes(chosen, outcomes, config)


def _drop_repeated(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts without those of earlier text, ground truth and data source."""
    unique = {
        (p.token_ids.tobytes(), repr(p.ground_truth), p.data_source): p for p in reversed(prompts)
    }
    return list(unique.values())[::-1]


def _to_prompt_scores(columns: Columns, prompt: Prompt, sampled: SampledPrompt) -> _PromptScores:
    """Take scores and answers from the columns that `score` returned; ValueError: wrong shape."""
    count = len(count_samples(sampled.columns))
    arrays = {"answers": np.zeros(count, np.int64), **columns}
    for name in ("scores", "answers"):
        if arrays[name].shape != (count,):
            raise ValueError(
                f"evaluation of uid {prompt.uid}: column {name} has shape {arrays[name].shape},"
                f" expected ({count},)"
            )
    return _PromptScores(
        prompt.data_source,
        arrays["scores"],
        arrays["answers"],
        {name: column for name, column in columns.items() if is_component_column(name)},
        EpisodeTotals.from_columns(sampled.columns),
        sampled.failure,
    )


def _summarize_outcomes(
    chosen: Sequence[tuple[str, Prompt]],
    outcomes: Sequence[_PromptScores | RewardError | EpisodeError],
    config: EvaluationConfig,
) -> EvaluationResult:
    """Compute metrics over the scored prompts: overall, by data_source and by file name.

    chosen: file name and prompt of each outcome. Raises an error of the first one's type if every
    prompt failed.
    """
    errors = [outcome for outcome in outcomes if not isinstance(outcome, _PromptScores)]
    scored = [
        (name, outcome)
        for (name, _), outcome in zip(chosen, outcomes, strict=True)
        if isinstance(outcome, _PromptScores)
    ]
    if not scored:
        raise type(errors[0])(
            f"evaluation: none of {len(errors)} prompts has a score; the first: {errors[0]}"
        ) from errors[0]
    rows = [row for _, row in scored]
    failures = [*map(str, errors), *(row.failure for row in rows if row.failure)]
    return replace(
        _summarize_prompts(rows, config),
        by_source={
            source: _summarize_prompts([row for row in rows if row.data_source == source], config)
            for source in sorted({row.data_source for row in rows})
        },
        by_file={
            name: _summarize_prompts([row for file, row in scored if file == name], config)
            for name in dict.fromkeys(name for name, _ in scored)
        },
        num_unscored=len(errors),
        num_unscored_samples=config.samples * len(rows) - sum(len(row.scores) for row in rows),
        unscored_reason=next(iter(failures), ""),
    )


def _summarize_prompts(rows: Sequence[_PromptScores], config: EvaluationConfig) -> EvaluationResult:
    sources = {row.data_source for row in rows}
    with_answers = {row.data_source for row in rows if row.answers.any()}
    # A majority vote over a subset of the sources would not compare with the other metrics.
    answers = [row.answers for row in rows] if with_answers == sources else None
    result = compute_evaluation_result(
        [row.scores for row in rows], answers, samples=config.samples, pass_score=config.pass_score
    )
    totals = sum((row.episodes for row in rows), EpisodeTotals())
    return replace(result, means={**_average_components(rows), **totals.compute_means()})


def _average_components(rows: Sequence[_PromptScores]) -> dict[str, float]:
    """Return the mean of each reward component, of which NaN is no part, by column name."""
    names = dict.fromkeys(name for row in rows for name in row.components)
    scores = {name: np.concatenate([row.components[name] for row in rows]) for name in names}
    judged = {name: column[~np.isnan(column)] for name, column in scores.items()}
    return {name: float(column.mean()) for name, column in judged.items() if column.size}
