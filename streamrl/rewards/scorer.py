"""The stages that judge texts: groups in, scores or costs out, a few texts kept to be looked at."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.errors import DeadlineError, RewardError, StreamError
from streamrl.messages import Columns, Experience, Filtered, group_rollouts
from streamrl.rewards.filtering import GroupFilter
from streamrl.rewards.reward_set import RewardSet
from streamrl.rewards.text import decode_completions, decode_ids
from streamrl.serving import Result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES_PER_DRAIN = 2


async def _judged(
    rewards: RewardSet, experience: Experience, texts: Sequence[str]
) -> Columns | StreamError:
    """What the rewards of a set say of texts, or why they cannot."""
    assert experience.prompt is not None
    try:
        return await rewards.score(experience.prompt, texts)
    except (RewardError, DeadlineError) as error:
        return error


class RewardScorer:
    """Decodes completions and runs a run's rewards on them, all groups of a call side by side.

    `group_filter` says which groups of the stream are not worth training; those of an evaluation
    are always scored.
    """

    def __init__(
        self,
        rewards: RewardSet,
        tokenizer: "PreTrainedTokenizerBase",
        group_filter: GroupFilter | None = None,
    ) -> None:
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._filter = group_filter
        self._samples: list[Mapping[str, Any]] = []

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """Columns `scores` and `reward/<name>`, float32 [G], or why a group has none."""
        return await asyncio.gather(*(self._score(experience) for experience in experiences))

    async def baseline(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """Column `baseline_scores`, float32 [G]: what the greedy completion of a group would get.

        It judges the rollouts and is not one of them: nothing is filtered for it.
        """
        return await asyncio.gather(*(self._baseline(experience) for experience in experiences))

    async def _baseline(self, experience: Experience) -> Columns | StreamError:
        columns = experience.columns
        (text,) = decode_ids(self._tokenizer, [columns["greedy_ids"]])
        found = await _judged(self._rewards, experience, [text])
        if isinstance(found, StreamError):
            return found
        return {"baseline_scores": np.repeat(found["scores"], len(columns["lengths"]))}

    async def _score(self, experience: Experience) -> Result:
        assert experience.prompt is not None
        texts = decode_completions(self._tokenizer, group_rollouts(experience.columns))
        columns = await _judged(self._rewards, experience, texts)
        if isinstance(columns, StreamError):
            return columns
        try:
            # What is scored for an evaluation comes without a lease.
            if not experience.lease.token:
                return columns
            reason = self._filter and self._filter.reason(experience.prompt, columns)
        except (RewardError, DeadlineError) as error:
            return error
        if reason:
            return Filtered(reason)
        if len(self._samples) < SAMPLES_PER_DRAIN:
            self._keep(experience, texts, columns)
        return columns

    def _keep(self, experience: Experience, texts: Sequence[str], columns: Columns) -> None:
        assert experience.prompt is not None
        scores = columns["scores"].tolist()
        self._samples.append(
            {
                "uid": experience.uid,
                "prompt": [dict(message) for message in experience.prompt.messages],
                "ground_truth": experience.prompt.ground_truth,
                "rollouts": [
                    {"completion": text, "score": score}
                    for text, score in zip(texts, scores, strict=True)
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
        self._costs = costs
        self._tokenizer = tokenizer

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """Columns `costs` and `cost/<name>`, float32 [G], or why a group has none."""
        return await asyncio.gather(*(self._score(experience) for experience in experiences))

    async def _score(self, experience: Experience) -> Columns | StreamError:
        texts = decode_completions(self._tokenizer, group_rollouts(experience.columns))
        return await _judged(self._costs, experience, texts)
