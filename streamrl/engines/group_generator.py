"""The generation engine as the generating stages see it: a prompt in, columns out."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch

from streamrl.dataflow import GENERATE, GREEDY
from streamrl.engines.forward import VALUE_HEAD
from streamrl.engines.generation import GenerationEngine
from streamrl.engines.seeds import rollout_seeds
from streamrl.messages import Array, Columns, Prompt, Rollout, group_columns

#: Of the likeliest completion, where a seed has no say.
ANY_SEED = 0


class GroupGenerator:
    """Samples `group_size` rollouts per prompt, with seeds that follow from run seed and uid."""

    def __init__(self, engine: GenerationEngine, *, group_size: int, run_seed: int) -> None:
        self._engine = engine
        self._group_size = group_size
        self._run_seed = run_seed

    @property
    def stages(self) -> Mapping[str, Callable[[Prompt, Columns | None], Awaitable[Columns]]]:
        """What it does in each stage of its role."""
        return {GENERATE.stage: self.group, GREEDY.stage: self.greedy}

    async def begun(self) -> Mapping[str, Columns]:
        """Nothing: a group is whole or not there."""
        return {}

    async def group(self, prompt: Prompt, begun: Columns | None = None) -> Columns:
        """The rollouts of a prompt, on the newest weights the engine holds."""
        seeds = rollout_seeds(self._run_seed, prompt.uid, self._group_size)
        return group_columns(await self._engine.generate(prompt.token_ids, seeds=seeds))

    async def greedy(self, prompt: Prompt, begun: Columns | None = None) -> Columns:
        """The prompt's likeliest completion, token by token, on those weights."""
        (rollout,) = await self.sample(prompt, [ANY_SEED], temperature=0.0)
        return {"greedy_ids": rollout.completion_ids}

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, temperature: float
    ) -> list[Rollout]:
        """One rollout per seed at another temperature: what an evaluation asks for."""
        return await self._engine.generate(prompt.token_ids, seeds=seeds, temperature=temperature)

    async def load_weights(self, tensors: Mapping[str, torch.Tensor | Array], version: int) -> None:
        """Sample with a new version from the next decode step on.

        A value head that is part of the policy's model samples nothing.
        """
        own = {name: value for name, value in tensors.items() if not name.startswith(VALUE_HEAD)}
        await self._engine.load_weights(own, version)
