"""The generation engine as the generate stage sees it: a prompt in, its group of rollouts out."""

from collections.abc import Mapping, Sequence

import torch

from streamrl.engines.generation import GenerationEngine
from streamrl.engines.seeds import rollout_seeds
from streamrl.messages import Array, Prompt, Rollout


class GroupGenerator:
    """Samples `group_size` rollouts per prompt, with seeds that follow from run seed and uid."""

    def __init__(self, engine: GenerationEngine, *, group_size: int, run_seed: int) -> None:
        self._engine = engine
        self._group_size = group_size
        self._run_seed = run_seed

    async def rollouts(self, prompt: Prompt) -> list[Rollout]:
        """The group of a prompt, on the newest weights the engine holds."""
        seeds = rollout_seeds(self._run_seed, prompt.uid, self._group_size)
        return await self._engine.generate(prompt.token_ids, seeds=seeds)

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, temperature: float
    ) -> list[Rollout]:
        """One rollout per seed at another temperature: what an evaluation asks for."""
        return await self._engine.generate(prompt.token_ids, seeds=seeds, temperature=temperature)

    async def load_weights(self, tensors: Mapping[str, torch.Tensor | Array], version: int) -> None:
        """Sample with a new version from the next decode step on."""
        await self._engine.load_weights(tensors, version)
