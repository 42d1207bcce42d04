"""Engines that only sleep, to measure the pipeline itself. Picklable."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.buffer.micro_batch_schedule import RolloutIndex
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import GENERATE_CALL, REWARD_CALL
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.training.model_trainer import ModelTrainer
from streamrl.engines.training.rollout_sums import sum_rollouts
from streamrl.engines.vllm.peer_rank import PeerRank
from streamrl.errors import ConfigError
from streamrl.messages import (
    Array,
    Columns,
    Experience,
    FinishReason,
    Prompt,
    Rollout,
    rollouts_to_columns,
)
from streamrl.rewards.interface.reward import RowFunction
from streamrl.rewards.reward_scorer import RewardStages
from streamrl.stream.protocols import FinishedCallback, SampleFunction
from streamrl.stream.stage_worker import StageResult
from streamrl.weights import WeightLoadStats

if TYPE_CHECKING:
    from streamrl.resharding.executors import ReshardingStats
    from streamrl.resharding.storage import ShardStorage

COMPLETION_TOKENS = 8


@dataclass(frozen=True)
class TimedEngines(RealEngineFactory):
    """generate_s per group, score_s per call, train_s per rollout of a rank; all 0: no work."""

    generate_s: float = 0.0
    score_s: float = 0.0
    train_s: float = 0.0

    async def make_generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> GenerationEngine:
        return _TimedGenerator(self.generate_s, config.algorithm.group_size)

    async def make_peer_rank(self, config: RunConfig, max_length: int, rank: int) -> PeerRank:
        """Raise ConfigError: sleeping engines cannot be split over ranks."""
        raise ConfigError(
            f"generator.tensor_parallel={config.generator.tensor_parallel}: must be 1"
        )

    async def make_reward_scorer(
        self, config: RunConfig, role: str, compute_logits: RowFunction | None = None
    ) -> RewardStages:
        stages = await super().make_reward_scorer(config, role, compute_logits)
        return replace(stages, functions={REWARD_CALL.stage: _TimedScorer(self.score_s).score})

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> ModelTrainer:
        return _TimedTrainer(self.train_s)


class _TimedGenerator(GenerationEngine):
    """Generation engine without vLLM: overrides all that a generator actor calls."""

    def __init__(self, seconds: float, group_size: int) -> None:
        self._seconds = seconds
        self._group_size = group_size
        self._version = -1

    @property
    def stages(self) -> Mapping[str, SampleFunction]:
        return {GENERATE_CALL.stage: self._group}

    async def collect_partial_rollouts(self) -> dict[str, Columns]:
        return {}

    async def _group(
        self, prompt: Prompt, start_s: Columns | None, finished: FinishedCallback
    ) -> Columns:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return rollouts_to_columns([self._rollout(prompt)] * self._group_size)

    def _rollout(self, prompt: Prompt) -> Rollout:
        return Rollout.from_single_turn(
            prompt.token_ids,
            [5] * COMPLETION_TOKENS,
            logprobs=[-1.0] * COMPLETION_TOKENS,
            versions=[self._version] * COMPLETION_TOKENS,
            finish_reason=FinishReason.STOP,
        )

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        return await self.activate_version(version)

    async def activate_version(self, version: int) -> WeightLoadStats:
        self._version = version
        return WeightLoadStats()

    async def compute_logprobs(self, sequences: Sequence[Array]) -> list[Array]:
        return [np.zeros(len(sequence), np.float32) for sequence in sequences]

    async def get_storage(self) -> "ShardStorage | None":
        return None

    async def sleep(self) -> None:
        pass

    async def pause(self, reason: str) -> None:
        pass

    async def resume(self, reason: str) -> None:
        pass


class _TimedScorer:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return [
            {"scores": np.ones(n, np.float32), "reward/exact": np.ones(n, np.float32)}
            for n in (len(experience.columns["lengths"]) for experience in experiences)
        ]


class _TimedTrainer(ModelTrainer):
    """Trainer rank without a model: overrides all that a trainer actor calls."""

    has_sharded_params = False
    vocab_size = 64

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def compute_token_logprobs(self, token_ids: Array) -> Array:
        return np.zeros(len(token_ids), np.float32)

    def set_adaptive_params(self, params: Mapping[str, float]) -> None:
        pass

    def plan_step(
        self, groups: Mapping[str, Columns], derived: Mapping[str, Columns] | None = None
    ) -> None:
        pass

    def precompute_logprobs(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], version: int = 0
    ) -> None:
        pass

    def sync_plan(self) -> None:
        pass

    def train_micro_batch(
        self,
        groups: Mapping[str, Columns],
        picks: Sequence[RolloutIndex],
        version: int = 0,
        *,
        epoch: int = 0,
    ) -> dict[str, float]:
        if self._seconds:
            time.sleep(self._seconds * len(picks))
        included = {
            uid: {"included": np.ones(len(columns["lengths"]), np.bool_)}
            for uid, columns in groups.items()
        }
        return sum_rollouts(groups, picks, included)

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        return 1.0

    def update(self, loss_denominator: float, version: int = 0) -> dict[str, float]:
        return {"policy/grad_norm": 0.0}

    def drain_advantages(self) -> dict[str, dict[int, float]]:
        return {}

    def full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(16)

    def merged_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.full_state()

    def count_received_bytes(self, gathered: Mapping[str, torch.Tensor]) -> int:
        return 0

    def reshard_to_generator(
        self, served: "ShardStorage | None", version: int
    ) -> "ReshardingStats | None":
        return None

    def offload_optimizer(self) -> None:
        pass

    def save_training_state(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def save_model(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def load_training_state(self, directory: Path) -> None:
        assert directory.is_dir()
