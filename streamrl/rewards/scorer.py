"""The stages that judge texts: groups in, scores or costs out, a few texts kept to be looked at."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.errors import RewardError, StreamError
from streamrl.messages import Array, Columns, Experience, FilteredGroup, extract_completions
from streamrl.rewards.group_filter import GroupFilter
from streamrl.rewards.interface.extract import decode_ids
from streamrl.rewards.reward_set import GroupRewardResult, RewardSet
from streamrl.stream.stage_worker import StageResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SAMPLES_PER_DRAIN = 2


async def _judge_texts(
    rewards: RewardSet, experience: Experience, texts: Sequence[str]
) -> GroupRewardResult | StreamError:
    """What the rewards of a set say of texts, or why they cannot."""
    assert experience.prompt is not None
    try:
        return await rewards.judge_group(experience.prompt, texts)
    except RewardError as error:
        return error


def hash_answers(judgement: GroupRewardResult) -> Array:
    """int64 [G]: equal where the answers are; 0 where there is none.

    The answers are those of the first component that finds any.
    """
    given = [
        [one.answer for one in found]
        for found in judgement.components.values()
        if any(one.answer is not None for one in found)
    ]
    size = len(judgement.totals)
    answers: Sequence[str | None] = given[0] if given else [None] * size
    return np.array([0 if answer is None else _hash_answer(answer) for answer in answers], np.int64)


def _hash_answer(answer: str) -> int:
    digest = hashlib.blake2b(answer.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def describe_completion(judgement: GroupRewardResult, place: int) -> dict[str, Any]:
    """Of one completion: the number and the verdict of each component, by its name.

    The number is None where the component says nothing; `numbers` has those that it gives besides.
    """
    found = {name: parts[place] for name, parts in judgement.components.items()}
    numbers = {name: dict(one.extra_metrics) for name, one in found.items() if one.extra_metrics}
    return {
        "components": {n: None if one.is_not_judged else one.score for n, one in found.items()},
        "verdicts": {name: one.outcome.value for name, one in found.items()},
        **({"numbers": numbers} if numbers else {}),
    }


class RewardScorer:
    """Decodes completions and runs a run's rewards on them, all groups of a call side by side.

    `group_filter` says which groups of the stream are not worth training; those of an evaluation
    are always scored.
    """

    def __init__(
        self,
        rewards: RewardSet,
        tokenizer: "PreTrainedTokenizerBase",
        group_filter: GroupFilter,
    ) -> None:
        self._reward_set = rewards
        self._tokenizer = tokenizer
        self._group_filter = group_filter
        self._samples: list[Mapping[str, Any]] = []

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Columns `scores` and `reward/<name>`, float32 [G], or why a group has none."""
        return await asyncio.gather(*(self._score_group(experience) for experience in experiences))

    async def score_baseline(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Column `baseline_scores`, float32 [G]: what the greedy completion of a group would get.

        It judges the rollouts and is not one of them: nothing is filtered for it.
        """
        return await asyncio.gather(*(self._score_greedy(experience) for experience in experiences))

    async def _score_greedy(self, experience: Experience) -> Columns | StreamError:
        columns = experience.columns
        (text,) = decode_ids(self._tokenizer, [columns["greedy_ids"]])
        found = await _judge_texts(self._reward_set, experience, [text])
        if isinstance(found, StreamError):
            return found
        baseline = found.totals.astype(np.float32)
        return {"baseline_scores": np.repeat(baseline, len(columns["lengths"]))}

    async def _score_group(self, experience: Experience) -> StageResult:
        assert experience.prompt is not None
        texts = decode_ids(self._tokenizer, extract_completions(experience.columns))
        judgement = await _judge_texts(self._reward_set, experience, texts)
        if isinstance(judgement, StreamError):
            return judgement
        columns = self._reward_set.to_columns(judgement)
        # What is scored for an evaluation comes without a lease.
        if not experience.lease.token:
            return {**columns, "answers": hash_answers(judgement)}
        try:
            reason = self._group_filter.explain_rejection(experience.prompt, columns)
        except RewardError as error:
            return error
        if reason:
            return FilteredGroup(reason)
        if len(self._samples) < MAX_SAMPLES_PER_DRAIN:
            self._record_sample(experience, texts, judgement)
        return columns

    def _record_sample(
        self, experience: Experience, texts: Sequence[str], judgement: GroupRewardResult
    ) -> None:
        assert experience.prompt is not None
        self._samples.append(
            {
                "uid": experience.uid,
                "prompt": [dict(message) for message in experience.prompt.messages],
                "ground_truth": experience.prompt.ground_truth,
                "rollouts": [
                    {"completion": text, "score": score, **describe_completion(judgement, i)}
                    for i, (text, score) in enumerate(
                        zip(texts, judgement.totals.tolist(), strict=True)
                    )
                ],
            }
        )

    def drain_samples(self) -> list[Mapping[str, Any]]:
        """The first groups scored since the last call, as text."""
        samples, self._samples = self._samples, []
        return samples


class CostScorer:
    """Decodes completions and runs a run's costs on them, all groups of a call side by side."""

    def __init__(self, costs: RewardSet, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._cost_set = costs
        self._tokenizer = tokenizer

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Columns `costs` and `cost/<name>`, float32 [G], or why a group has none."""
        return await asyncio.gather(*(self._score_group(experience) for experience in experiences))

    async def _score_group(self, experience: Experience) -> Columns | StreamError:
        texts = decode_ids(self._tokenizer, extract_completions(experience.columns))
        found = await _judge_texts(self._cost_set, experience, texts)
        return found if isinstance(found, StreamError) else self._cost_set.to_columns(found)
