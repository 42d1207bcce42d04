"""Engines that only take time, to measure the pipeline itself. Picklable; see EngineFactory."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamrl.actors.protocols import HostedGenerator, HostedPart, HostedRank, HostedScorer
from streamrl.buffer.assembly.packing import Pick
from streamrl.config import RunConfig
from streamrl.dataflow import GENERATE, REWARD
from streamrl.engines.generator_config import Sampling
from streamrl.errors import ConfigError
from streamrl.messages import (
    Array,
    Columns,
    Experience,
    FinishReason,
    Prompt,
    Rollout,
    group_columns,
)
from streamrl.stream.protocols import Finished, Sample
from streamrl.stream.stage_worker import Result
from streamrl.weights import Loaded

if TYPE_CHECKING:
    from streamrl.resharding.executors import Moved
    from streamrl.resharding.storage import Storage

COMPLETION_TOKENS = 8


@dataclass(frozen=True)
class TimedEngines:
    """generate_s per group, score_s per call, train_s per rollout of a rank; all 0 is nothing."""

    generate_s: float = 0.0
    score_s: float = 0.0
    train_s: float = 0.0

    async def generator(self, config: RunConfig, max_length: int, replica: int) -> HostedGenerator:
        """A generator that sleeps."""
        return _Generator(self.generate_s, config.algorithm.group_size)

    async def generator_part(self, config: RunConfig, max_length: int, rank: int) -> HostedPart:
        """There is none: what sleeps is not split."""
        raise ConfigError(
            f"generator.tensor_parallel={config.generator.tensor_parallel}: must be 1"
        )

    async def scorer(self, config: RunConfig, max_length: int, role: str) -> HostedScorer:
        """A scorer that sleeps."""
        return HostedScorer({REWARD.stage: _Scorer(self.score_s).score})

    def trainer(self, config: RunConfig, max_length: int, rank: int, role: str) -> HostedRank:
        """A rank that sleeps."""
        return _Rank(self.train_s)


class _Generator:
    def __init__(self, seconds: float, group_size: int) -> None:
        self._seconds = seconds
        self._group_size = group_size
        self._version = -1

    @property
    def stages(self) -> Mapping[str, Sample]:
        return {GENERATE.stage: self._group}

    async def begun(self) -> Mapping[str, Columns]:
        return {}

    async def _group(self, prompt: Prompt, begun: Columns | None, finished: Finished) -> Columns:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return group_columns([self._rollout(prompt)] * self._group_size)

    def _rollout(self, prompt: Prompt) -> Rollout:
        return Rollout.single_turn(
            prompt.token_ids,
            [5] * COMPLETION_TOKENS,
            logprobs=[-1.0] * COMPLETION_TOKENS,
            versions=[self._version] * COMPLETION_TOKENS,
            finish_reason=FinishReason.STOP,
        )

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: Sampling
    ) -> list[Rollout]:
        return [self._rollout(prompt)] * len(seeds)

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> Loaded:
        return await self.take_up(version)

    async def take_up(self, version: int) -> Loaded:
        self._version = version
        return Loaded()

    async def probe(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        return None

    async def storage(self) -> "Storage | None":
        return None

    async def release_kv(self) -> None:
        pass

    async def suspend(self, reason: str) -> None:
        pass

    async def resume(self, reason: str) -> None:
        pass


class _Scorer:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return [
            {"scores": np.ones(n, np.float32), "reward/exact": np.ones(n, np.float32)}
            for n in (len(experience.columns["lengths"]) for experience in experiences)
        ]


class _Rank:
    gathers = False
    vocab_size = 64

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def token_logprobs(self, token_ids: Array) -> Array:
        return np.zeros(len(token_ids), np.float32)

    def adopt(self, dials: Mapping[str, float]) -> None:
        pass

    def plan(self, groups: Mapping[str, Columns]) -> None:
        pass

    def look(self, groups: Mapping[str, Columns], picks: Sequence[Pick]) -> None:
        pass

    def settle(self) -> None:
        pass

    def train_micro_batch(
        self, groups: Mapping[str, Columns], picks: Sequence[Pick], version: int
    ) -> Mapping[str, float]:
        if self._seconds:
            time.sleep(self._seconds * len(picks))
        return {}

    def normaliser(self, sums: Mapping[str, float]) -> float:
        return 1.0

    def step(self, normaliser: float) -> Mapping[str, float]:
        return {"policy/grad_norm": 0.0}

    def full_state(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(16)

    def whole_state(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.full_state()

    def received_bytes(self, gathered: Mapping[str, torch.Tensor]) -> int:
        return 0

    def switch(self, served: "Storage | None", version: int) -> "Moved | None":
        return None

    def offload_optimizer(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def save_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, folder: Path) -> None:
        assert folder.is_dir()
