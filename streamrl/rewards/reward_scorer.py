"""Workers of the reward stage: decode completions, score them, filter groups, record rollouts."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from streamrl.errors import RewardError, StreamError
from streamrl.group_episodes import count_samples, find_first_samples
from streamrl.messages import Array, Columns, Experience, FilteredGroup
from streamrl.rewards.episode_record import MAX_DETAILED_TOKENS, describe_rollouts
from streamrl.rewards.group_filter import GroupFilter
from streamrl.rewards.interface.completion import Completion, decode_rollouts
from streamrl.rewards.interface.extract import decode_completions
from streamrl.rewards.reward_set import GroupRewardResult, RewardSet
from streamrl.stream.stage_worker import StageResult
from streamrl.telemetry.config import RolloutConfig
from streamrl.telemetry.rollout_log import RecordedGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RECORDED_CHARACTERS = 64_000_000
"""Most text of recorded groups between two drains; a scorer records no more until the next."""


async def _judge_group(
    rewards: RewardSet, experience: Experience, completions: Sequence[Completion]
) -> GroupRewardResult | StreamError:
    """Score the decoded completions of a group; return a RewardError instead of raising."""
    assert experience.prompt is not None
    try:
        return await rewards.judge_group(experience.prompt, completions)
    except RewardError as error:
        return error


def hash_answers(group_result: GroupRewardResult) -> Array:
    """Return answer ids for maj@k, int64 [G]: equal ids for equal answers, 0 for no answer.

    The first component with at least one answer supplies the answers.
    """
    candidates = [
        [result.answer for result in results]
        for results in group_result.components.values()
        if any(result.answer is not None for result in results)
    ]
    size = len(group_result.totals)
    answers: Sequence[str | None] = candidates[0] if candidates else [None] * size
    return np.array([0 if answer is None else _hash_answer(answer) for answer in answers], np.int64)


def _hash_answer(answer: str) -> int:
    digest = hashlib.blake2b(answer.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def describe_completion(group_result: GroupRewardResult, index: int) -> dict[str, Any]:
    """Return scores and outcomes of the completion at `index` by component, as JSON types.

    The score is None where the component abstains. `numbers` holds the extra metrics.
    """
    results = {name: group[index] for name, group in group_result.components.items()}
    numbers = {name: dict(r.extra_metrics) for name, r in results.items() if r.extra_metrics}
    return {
        "components": {name: None if r.is_not_judged else r.score for name, r in results.items()},
        "verdicts": {name: r.outcome.value for name, r in results.items()},
        **({"numbers": numbers} if numbers else {}),
    }


class RewardScorer:
    """Decodes completions and scores them with the run's rewards, all groups concurrently.

    group_filter: applies to groups of the stream, not to groups of an evaluation. recording: which
    scored groups are kept for `rollouts/`.
    """

    def __init__(
        self,
        rewards: RewardSet,
        tokenizer: "PreTrainedTokenizerBase",
        group_filter: GroupFilter,
        recording: RolloutConfig,
    ) -> None:
        self._reward_set = rewards
        self._tokenizer = tokenizer
        self._group_filter = group_filter
        self._recording = recording
        self._recorded: list[RecordedGroup] = []
        self._num_recorded = 0

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Return per group `scores` and `reward/<name>`, float32 [G], a filter verdict or an error.

        Groups of an evaluation are never filtered, and also get the column `answers`.
        """
        return await asyncio.gather(*(self._score_group(experience) for experience in experiences))

    async def score_baseline(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Return column `baseline_scores`, float32 [G]: the unfiltered score of the greedy text."""
        return await asyncio.gather(*(self._score_greedy(experience) for experience in experiences))

    async def _score_greedy(self, experience: Experience) -> Columns | StreamError:
        columns = experience.columns
        (text,) = decode_completions(self._tokenizer, [columns["greedy_ids"]])
        group_result = await _judge_group(
            self._reward_set, experience, [Completion.from_text(text)]
        )
        if isinstance(group_result, StreamError):
            return group_result
        baseline = group_result.totals.astype(np.float32)
        return {"baseline_scores": np.repeat(baseline, len(columns["lengths"]))}

    async def _score_group(self, experience: Experience) -> StageResult:
        """Score a group of the stream or of an evaluation; filter only groups of the stream.

        Columns of the stream have an entry per rollout, those of an evaluation per episode.
        """
        assert experience.prompt is not None
        completions = decode_rollouts(self._tokenizer, experience.columns)
        group_result = await _judge_group(self._reward_set, experience, completions)
        if isinstance(group_result, StreamError):
            return group_result
        columns = self._reward_set.to_columns(group_result)
        # Groups of an evaluation come without a lease.
        if not experience.lease.token:
            return {**columns, "answers": hash_answers(group_result)}
        reasons = experience.columns["finish_reason"]
        ends = {"finish_reason": reasons[find_first_samples(count_samples(experience.columns))]}
        try:
            reason = self._group_filter(experience.prompt, columns | ends)
        except RewardError as error:
            return error
        if reason:
            return FilteredGroup(reason)
        if self._recording.every and self._num_recorded < MAX_RECORDED_CHARACTERS:
            self._record_group(experience, completions, group_result)
        return _repeat_per_rollout(columns, experience)

    def _record_group(
        self,
        experience: Experience,
        completions: Sequence[Completion],
        group_result: GroupRewardResult,
    ) -> None:
        assert experience.prompt is not None
        prompt = experience.prompt
        detailed = MAX_DETAILED_TOKENS if self._recording.logprobs else 0
        rollouts = describe_rollouts(
            self._tokenizer, experience.columns, max_detailed_tokens=detailed
        )
        self._recorded.append(
            RecordedGroup(
                step=0,  # known once the group is trained
                uid=experience.uid,
                environment=prompt.environment,
                prompt=tuple(dict(message) for message in prompt.messages),
                ground_truth=prompt.ground_truth,
                rollouts=tuple(
                    msgspec.structs.replace(
                        rollout,
                        completion=completion.conversation,
                        score=score,
                        **describe_completion(group_result, i),
                    )
                    for i, (rollout, completion, score) in enumerate(
                        zip(rollouts, completions, group_result.totals.tolist(), strict=True)
                    )
                ),
            )
        )
        self._num_recorded += sum(len(completion.conversation) for completion in completions)

    def drain_recorded(self) -> list[RecordedGroup]:
        """Return the groups recorded since the last call, in the order of their scoring."""
        recorded, self._recorded, self._num_recorded = self._recorded, [], 0
        return recorded


async def score_costs(
    costs: RewardSet, tokenizer: "PreTrainedTokenizerBase", experiences: Sequence[Experience]
) -> Sequence[StageResult]:
    """Return columns `costs` and `cost/<name>`, float32 [G], or an error, per group."""
    results = await asyncio.gather(
        *(
            _judge_group(costs, group, decode_rollouts(tokenizer, group.columns))
            for group in experiences
        )
    )
    return [
        result
        if isinstance(result, StreamError)
        else _repeat_per_rollout(costs.to_columns(result), group)
        for group, result in zip(experiences, results, strict=True)
    ]


def _repeat_per_rollout(columns: Columns, experience: Experience) -> Columns:
    """Return columns with an entry per rollout, from columns with an entry per episode."""
    samples = count_samples(experience.columns)
    return {name: np.repeat(column, samples) for name, column in columns.items()}
