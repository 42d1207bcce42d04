"""Adapter from the generation engine to the generate stages: a prompt in, a group's columns out."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch

from streamrl.data.rollout_seeds import make_rollout_seeds
from streamrl.dataflow import GENERATE_CALL, GREEDY_CALL
from streamrl.engines.generation.generator import GenerationEngine
from streamrl.engines.generation.pending_requests import ProgressWatch, do_nothing
from streamrl.engines.generator_config import SamplingSettings
from streamrl.engines.models.forward import VALUE_HEAD_PREFIX
from streamrl.messages import (
    Array,
    Columns,
    Prompt,
    Rollout,
    columns_to_rollouts,
    rollouts_to_columns,
)
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import WeightLoadStats

#: Greedy decoding ignores the seed.
GREEDY_SEED = 0


class GroupGenerator:
    """Samples `group_size` rollouts per prompt; derives their seeds from run seed and uid."""

    def __init__(self, engine: GenerationEngine, *, group_size: int, run_seed: int) -> None:
        self._engine = engine
        self._group_size = group_size
        self._run_seed = run_seed

    @property
    def stages(self) -> Mapping[str, Callable[..., Awaitable[Columns]]]:
        """Methods that process the prompts of the two generate stages, by stage name."""
        return {GENERATE_CALL.stage: self.generate_group, GREEDY_CALL.stage: self.generate_greedy}

    async def generate_group(
        self,
        prompt: Prompt,
        partial_rollouts: Columns | None = None,
        on_finished: Callable[[], None] = do_nothing,
    ) -> Columns:
        """Sample the rollouts of a prompt with the newest weights; return the columns of the group.

        `partial_rollouts` are columns from `collect_partial_rollouts` of this or another generator,
        which sampling resumes. `on_finished` is called once for each finished rollout.
        """
        rollouts = await self._engine.generate(
            prompt.token_ids,
            seeds=make_rollout_seeds(self._run_seed, prompt.uid, self._group_size),
            partial_rollouts=columns_to_rollouts(partial_rollouts)
            if partial_rollouts is not None
            else (),
            watch=ProgressWatch(prompt.uid, on_finished),
        )
        return rollouts_to_columns(rollouts)

    async def collect_partial_rollouts(self) -> dict[str, Columns]:
        """Return the columns, by uid, of every group being sampled that has a sampled token.

        Unfinished rollouts have FinishReason.ABORT.
        """
        progress = await self._engine.collect_partial_rollouts()
        return {
            uid: rollouts_to_columns(rollouts)
            for uid, rollouts in progress.items()
            if any(rollout.loss_mask.any() for rollout in rollouts)
        }

    async def generate_greedy(
        self,
        prompt: Prompt,
        partial_rollouts: Columns | None = None,
        on_finished: Callable[[], None] = do_nothing,
    ) -> Columns:
        """Decode one completion of the prompt at temperature 0 with the newest weights.

        Ignores `partial_rollouts` and `on_finished`: a greedy completion is never resumed.
        """
        (rollout,) = await self.sample(prompt, [GREEDY_SEED], sampling=SamplingSettings(0.0))
        return {"greedy_ids": rollout.completion_ids}

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: SamplingSettings
    ) -> list[Rollout]:
        return await self._engine.generate(prompt.token_ids, seeds=seeds, sampling=sampling)

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array]:
        _, logprobs = await self._engine.compute_logprobs(sequences)
        return logprobs

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor | Array], version: int
    ) -> WeightLoadStats:
        """Load the policy's parameters as `version`; value heads are left out."""
        # vLLM does not know the value head of a model shared by policy and critic.
        policy_tensors = {
            name: value for name, value in tensors.items() if not name.startswith(VALUE_HEAD_PREFIX)
        }
        return await self._engine.load_weights(policy_tensors, version)

    async def get_storage(self) -> ShardStorage | None:
        return await self._engine.get_storage()

    async def activate_version(self, version: int) -> WeightLoadStats:
        return await self._engine.activate_version(version)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def pause(self, reason: str) -> None:
        await self._engine.pause(reason)

    async def resume(self, reason: str) -> None:
        await self._engine.resume(reason)
