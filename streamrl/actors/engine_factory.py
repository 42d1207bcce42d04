"""How an actor makes what it hosts. The real engines here; tests and benchmarks bring their own.

Engines are imported where they are made: every actor unpickles the factory, one of them needs vLLM.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.config import RunConfig
from streamrl.dataflow import CRITIC, POLICY
from streamrl.engines.packing import Pick
from streamrl.messages import Columns, Experience, Prompt, Rollout
from streamrl.serving import Result

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.engines.scoring import LogprobScorer, ValueScorer
    from streamrl.engines.tasks import Task


class HostedGenerator(Protocol):
    """What a generator actor hosts: the pipeline's Generator, and sampling for evaluations."""

    async def rollouts(self, prompt: Prompt) -> list[Rollout]: ...

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, temperature: float
    ) -> list[Rollout]: ...

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> None: ...


class HostedScorer(Protocol):
    """What a scorer actor hosts: the pipeline's Scorer, and a few scored texts to look at."""

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]: ...

    def drain_samples(self) -> Sequence[Mapping[str, Any]]: ...


class HostedShadow(HostedScorer, Protocol):
    """A scorer that follows a model in training."""

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> None: ...


class HostedRank(Protocol):
    """What a trainer actor hosts. Not asyncio; called from one thread."""

    def adopt(self, dials: Mapping[str, float]) -> None: ...

    def plan(self, groups: Mapping[str, Columns]) -> None: ...

    def look(self, groups: Mapping[str, Columns], picks: Sequence[Pick]) -> None: ...

    def settle(self) -> None: ...

    def train_micro_batch(
        self, groups: Mapping[str, Columns], picks: Sequence[Pick], version: int
    ) -> Mapping[str, float]: ...

    def normaliser(self, sums: Mapping[str, float]) -> float: ...

    def step(self, normaliser: float) -> Mapping[str, float]: ...

    def full_state(self) -> Iterable[tuple[str, "Tensor"]]: ...

    def save(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class EngineFactory(Protocol):
    """Makes the engines of a run, each in the process that hosts it. Must be picklable."""

    async def generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> HostedGenerator: ...

    async def scorer(self, config: RunConfig, role: str) -> HostedScorer: ...

    def trainer(self, config: RunConfig, rank: int, role: str) -> HostedRank: ...


class ReferenceScorer:
    """The reference stage: logprobs of the model the run started from."""

    def __init__(self, model: "LogprobScorer") -> None:
        self._model = model

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """The column ref_logprobs of each group, computed beside the event loop."""
        return [
            await asyncio.to_thread(self._model.ref_logprobs, experience.columns)
            for experience in experiences
        ]

    def drain_samples(self) -> Sequence[Mapping[str, Any]]:
        """Nothing to look at."""
        return ()


class ShadowScorer:
    """The value stage: what the critic expects, under the newest version that has come."""

    def __init__(self, model: "ValueScorer") -> None:
        self._model = model
        self._lock = asyncio.Lock()

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """The column values of each group, computed beside the event loop."""
        async with self._lock:
            return [
                await asyncio.to_thread(self._model.values, experience.columns)
                for experience in experiences
            ]

    async def load_weights(self, tensors: Mapping[str, "Tensor"], version: int) -> None:
        """Go over to another version, between two batches."""
        async with self._lock:
            await asyncio.to_thread(self._model.load_weights, tensors)

    def drain_samples(self) -> Sequence[Mapping[str, Any]]:
        """Nothing to look at."""
        return ()


class RealEngines:
    """vLLM, transformers, DeepSpeed or torch: what a run is made of."""

    async def generator(self, config: RunConfig, max_length: int, replica: int) -> HostedGenerator:
        """A vLLM engine of its own per replica."""
        from streamrl.engines.generation import GenerationEngine
        from streamrl.engines.group_generator import GroupGenerator

        engine = await GenerationEngine.start(
            config.model.path,
            config.generator,
            seed=config.run.seed + replica,
            max_length=max_length,
        )
        return GroupGenerator(
            engine, group_size=config.algorithm.group_size, run_seed=config.run.seed
        )

    async def scorer(self, config: RunConfig, role: str) -> HostedScorer:
        """The scorer of a role of the dataflow: reward or reference."""
        return SCORERS[role](config)

    def trainer(self, config: RunConfig, rank: int, role: str) -> HostedRank:
        """One rank of a model's trainer."""
        from streamrl.engines.training import ModelTrainer

        return ModelTrainer(_task(config, role), config=config.trainer_of(role), rank=rank)


def _task(config: RunConfig, role: str) -> "Task":
    from streamrl.engines.tasks import CriticTask, PolicyTask

    path, row, settings = config.model_of(role), config.algorithm.row, config.settings
    if role == POLICY:
        return PolicyTask(path, row, settings, config.generator.temperature)
    return CriticTask(path, row, settings, config.critic.value_clip)


def _reward_scorer(config: RunConfig) -> HostedScorer:
    from streamrl.data import load_tokenizer
    from streamrl.rewards import build_rewards
    from streamrl.rewards.filtering import build_filter
    from streamrl.rewards.scorer import RewardScorer

    rewards = build_rewards(config.rewards, timeout_s=config.scorer.timeout_s)
    return RewardScorer(rewards, load_tokenizer(config.model.path), build_filter(config.filter))


def _reference_scorer(config: RunConfig) -> HostedScorer:
    from streamrl.engines.scoring import LogprobScorer

    return ReferenceScorer(
        LogprobScorer(
            config.model.path,
            temperature=config.generator.temperature,
            micro_batch_tokens=config.pipeline.micro_batch_tokens,
            threads=config.trainer.threads,
            dtype=config.trainer.dtype,
        )
    )


def _value_scorer(config: RunConfig) -> HostedScorer:
    from streamrl.engines.scoring import ValueScorer

    trainer = config.trainer_of(CRITIC)
    return ShadowScorer(
        ValueScorer(
            config.model_of(CRITIC),
            micro_batch_tokens=config.pipeline.micro_batch_tokens,
            threads=trainer.threads,
            dtype=trainer.dtype,
        )
    )


SCORERS: Mapping[str, Callable[[RunConfig], HostedScorer]] = {
    "reward": _reward_scorer,
    "reference": _reference_scorer,
    "value": _value_scorer,
}
