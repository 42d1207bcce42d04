"""The generation engine as the generating stages see it: a prompt in, columns out."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch

from streamrl.data.rollout_seeds import rollout_seeds
from streamrl.dataflow import GENERATE, GREEDY
from streamrl.engines.generation.generator import GenerationEngine
from streamrl.engines.generation.pending_requests import Watch, nobody
from streamrl.engines.generator_config import Sampling
from streamrl.engines.models.forward import VALUE_HEAD
from streamrl.messages import Array, Columns, Prompt, Rollout, group_columns, group_rollouts
from streamrl.resharding.storage import Storage
from streamrl.weights import Loaded

#: Of the likeliest completion, where a seed has no say.
ANY_SEED = 0


class GroupGenerator:
    """Samples `group_size` rollouts per prompt, with seeds that follow from run seed and uid."""

    def __init__(self, engine: GenerationEngine, *, group_size: int, run_seed: int) -> None:
        self._engine = engine
        self._group_size = group_size
        self._run_seed = run_seed

    @property
    def stages(self) -> Mapping[str, Callable[..., Awaitable[Columns]]]:
        """What it does in each stage of its role."""
        return {GENERATE.stage: self.group, GREEDY.stage: self.greedy}

    async def group(
        self,
        prompt: Prompt,
        begun: Columns | None = None,
        finished: Callable[[], None] = nobody,
    ) -> Columns:
        """The rollouts of a prompt, on the newest weights the engine holds.

        `begun` is what there is of them already, as `begun()` gave it, here or elsewhere;
        `finished` is called for each that is.
        """
        rollouts = await self._engine.generate(
            prompt.token_ids,
            seeds=rollout_seeds(self._run_seed, prompt.uid, self._group_size),
            begun=group_rollouts(begun) if begun is not None else (),
            watch=Watch(prompt.uid, finished),
        )
        return group_columns(rollouts)

    async def begun(self) -> dict[str, Columns]:
        """What there is of each group under way, by uid, if any token of it is sampled.

        Its rollouts that are not finished have the finish reason ABORT.
        """
        progress = await self._engine.progress()
        return {
            uid: group_columns(rollouts)
            for uid, rollouts in progress.items()
            if any(rollout.loss_mask.any() for rollout in rollouts)
        }

    async def greedy(
        self,
        prompt: Prompt,
        begun: Columns | None = None,
        finished: Callable[[], None] = nobody,
    ) -> Columns:
        """The prompt's likeliest completion, token by token, on those weights.

        The only one: with it all is finished, and what is begun is not gone on with.
        """
        (rollout,) = await self.sample(prompt, [ANY_SEED], sampling=Sampling(0.0))
        return {"greedy_ids": rollout.completion_ids}

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: Sampling
    ) -> list[Rollout]:
        """Sample one rollout per seed in another way: what an evaluation asks for."""
        return await self._engine.generate(prompt.token_ids, seeds=seeds, sampling=sampling)

    async def probe(self, sequences: Sequence[Array]) -> Sequence[Array]:
        """What the weights that are served say of these tokens; see `GenerationEngine.probe`."""
        _, logprobs = await self._engine.probe(sequences)
        return logprobs

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor | Array], version: int
    ) -> Loaded:
        """Sample with a new version from the next decode step on.

        A value head that is part of the policy's model samples nothing.
        """
        own = {name: value for name, value in tensors.items() if not name.startswith(VALUE_HEAD)}
        return await self._engine.load_weights(own, version)

    async def storage(self) -> Storage | None:
        """See `GenerationEngine.storage`."""
        return await self._engine.storage()

    async def take_up(self, version: int) -> Loaded:
        """See `GenerationEngine.take_up`."""
        return await self._engine.take_up(version)

    async def release_kv(self) -> None:
        """See `GenerationEngine.release_kv`."""
        await self._engine.release_kv()

    async def suspend(self, reason: str) -> None:
        """See `GenerationEngine.suspend`."""
        await self._engine.suspend(reason)

    async def resume(self, reason: str) -> None:
        """See `GenerationEngine.resume`."""
        await self._engine.resume(reason)
