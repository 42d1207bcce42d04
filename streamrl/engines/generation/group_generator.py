"""The generation engine as the generating stages see it: a prompt in, columns out."""

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

#: Of the likeliest completion, where a seed has no say.
GREEDY_SEED = 0


class GroupGenerator:
    """Samples `group_size` rollouts per prompt, with seeds that follow from run seed and uid."""

    def __init__(self, engine: GenerationEngine, *, group_size: int, run_seed: int) -> None:
        self._engine = engine
        self._group_size = group_size
        self._run_seed = run_seed

    @property
    def stages(self) -> Mapping[str, Callable[..., Awaitable[Columns]]]:
        """What it does in each stage of its role."""
        return {GENERATE_CALL.stage: self.generate_group, GREEDY_CALL.stage: self.generate_greedy}

    async def generate_group(
        self,
        prompt: Prompt,
        begun: Columns | None = None,
        finished: Callable[[], None] = do_nothing,
    ) -> Columns:
        """The rollouts of a prompt, on the newest weights the engine holds.

        `begun` is what there is of them already, as `begun()` gave it, here or elsewhere;
        `finished` is called for each that is.
        """
        rollouts = await self._engine.generate(
            prompt.token_ids,
            seeds=make_rollout_seeds(self._run_seed, prompt.uid, self._group_size),
            begun=columns_to_rollouts(begun) if begun is not None else (),
            watch=ProgressWatch(prompt.uid, finished),
        )
        return rollouts_to_columns(rollouts)

    async def collect_partial_rollouts(self) -> dict[str, Columns]:
        """What there is of each group under way, by uid, if any token of it is sampled.

        Its rollouts that are not finished have the finish reason ABORT.
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
        begun: Columns | None = None,
        finished: Callable[[], None] = do_nothing,
    ) -> Columns:
        """The prompt's likeliest completion, token by token, on those weights.

        The only one: with it all is finished, and what is begun is not gone on with.
        """
        (rollout,) = await self.sample(prompt, [GREEDY_SEED], sampling=SamplingSettings(0.0))
        return {"greedy_ids": rollout.completion_ids}

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: SamplingSettings
    ) -> list[Rollout]:
        """Sample one rollout per seed in another way: what an evaluation asks for."""
        return await self._engine.generate(prompt.token_ids, seeds=seeds, sampling=sampling)

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array]:
        """What the weights that are served say of these tokens; see `GenerationEngine.probe`."""
        _, logprobs = await self._engine.compute_logprobs(sequences)
        return logprobs

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor | Array], version: int
    ) -> WeightLoadStats:
        """Sample with a new version from the next decode step on.

        A value head that is part of the policy's model samples nothing.
        """
        own = {
            name: value for name, value in tensors.items() if not name.startswith(VALUE_HEAD_PREFIX)
        }
        return await self._engine.load_weights(own, version)

    async def get_storage(self) -> ShardStorage | None:
        """See `GenerationEngine.get_storage`."""
        return await self._engine.get_storage()

    async def activate_version(self, version: int) -> WeightLoadStats:
        """See `GenerationEngine.take_up`."""
        return await self._engine.activate_version(version)

    async def sleep(self) -> None:
        """See `GenerationEngine.sleep`."""
        await self._engine.sleep()

    async def pause(self, reason: str) -> None:
        """See `GenerationEngine.suspend`."""
        await self._engine.pause(reason)

    async def resume(self, reason: str) -> None:
        """See `GenerationEngine.resume`."""
        await self._engine.resume(reason)
