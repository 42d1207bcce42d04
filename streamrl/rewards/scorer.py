"""The reward stage: groups in, their scores out, with a few texts kept to be looked at."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streamrl.errors import DeadlineError, RewardError, StreamError
from streamrl.messages import Columns, Experience, Filtered, group_rollouts
from streamrl.rewards.filtering import GroupFilter
from streamrl.rewards.reward_set import RewardSet
from streamrl.rewards.text import decode_completions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES_PER_DRAIN = 2


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

    async def score(
        self, experiences: Sequence[Experience]
    ) -> list[Columns | Filtered | StreamError]:
        """Columns `scores` and `reward/<name>`, float32 [G], or why a group has none."""
        return await asyncio.gather(*(self._score(experience) for experience in experiences))

    async def _score(self, experience: Experience) -> Columns | Filtered | StreamError:
        assert experience.prompt is not None
        texts = decode_completions(self._tokenizer, group_rollouts(experience.columns))
        try:
            columns = await self._rewards.score(experience.prompt, texts)
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
