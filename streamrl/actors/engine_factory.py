"""vLLM, transformers, DeepSpeed or torch: the engines of a run.

They are imported where they are made: every actor unpickles the factory, one of them needs vLLM.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from streamrl.actors.protocols import HostedGenerator, HostedPart, HostedScorer
from streamrl.config import RunConfig
from streamrl.config.cross_checks import trained_steps
from streamrl.dataflow import BASELINE, COST, COST_VALUE, POLICY, REFERENCE, REWARD, VALUE, Call
from streamrl.engines.memory.gc_paused import uncollected
from streamrl.messages import Array, Columns, Experience
from streamrl.stream.stage_worker import Result
from streamrl.weights import Loaded

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.engines.training.pretraining import Pretraining
    from streamrl.engines.training.tasks import Task
    from streamrl.engines.training.trainer import ModelTrainer
    from streamrl.engines.vllm.engine import EngineSpec


class Shadow:
    """A stage that scores with a model kept elsewhere, under the newest version that has come."""

    def __init__(
        self,
        compute: Callable[[Columns], Columns],
        load: Callable[[Mapping[str, "Tensor"]], None],
    ) -> None:
        """`compute` makes the columns of a group; `load` takes another version."""
        self._compute = compute
        self._load = load
        self._lock = asyncio.Lock()

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """The columns of each group, computed beside the event loop."""
        async with self._lock:
            return [
                await asyncio.to_thread(self._compute, experience.columns)
                for experience in experiences
            ]

    async def load_weights(self, tensors: Mapping[str, "Tensor"], version: int) -> Loaded:
        """Go over to another version, between two batches."""
        async with self._lock:
            started = time.perf_counter()
            await asyncio.to_thread(self._load, tensors)
            return Loaded(pause_s=time.perf_counter() - started)

    async def probe(self, sequences: Sequence[Array]) -> None:
        """It is asked about rollouts, not about sequences."""


class RealEngines:
    """vLLM, transformers, DeepSpeed or torch: what a run is made of."""

    async def generator(self, config: RunConfig, max_length: int, replica: int) -> HostedGenerator:
        """A vLLM engine of its own per replica, which others compute with where they share it."""
        with uncollected():
            from streamrl.engines.generation.generator import GenerationEngine
            from streamrl.engines.generation.group_generator import GroupGenerator

            engine = await GenerationEngine.of(_engine_spec(config, max_length, replica))
        return GroupGenerator(
            engine, group_size=config.algorithm.group_size, run_seed=config.run.seed
        )

    async def generator_part(self, config: RunConfig, max_length: int, rank: int) -> HostedPart:
        """vLLM's worker with a part of the engine that the leader of the rank's team has."""
        with uncollected():
            from streamrl.engines.vllm.follower_rank import GeneratorPart

            return await GeneratorPart.start(_engine_spec(config, max_length, rank))

    async def scorer(self, config: RunConfig, max_length: int, role: str) -> HostedScorer:
        """The scorer of a role of the dataflow: reward, cost, reference or a critic's shadow."""
        with uncollected():
            scorer = SCORERS[role](config, max_length)
            await scorer.start()
            return scorer

    def trainer(self, config: RunConfig, max_length: int, rank: int, role: str) -> "ModelTrainer":
        """One rank of a model's trainer."""
        has_texts = role == POLICY and bool(config.data.pretrain)
        with uncollected():
            from streamrl.engines.training.trainer import ModelTrainer

            return ModelTrainer(
                _task(config, max_length, role),
                config=config.trainer_of(role),
                rank=rank,
                pretraining=_pretraining(config) if has_texts else None,
                num_steps=trained_steps(config, role),
            )


def _engine_spec(config: RunConfig, max_length: int, replica: int) -> "EngineSpec":
    from streamrl.engines.vllm.engine import EngineSpec
    from streamrl.engines.vllm.rank_groups import team_of

    size = config.generator.tensor_parallel
    is_shared = config.placement.is_hybrid and size > 1
    team = team_of(replica, config.trainer, size) if is_shared else None
    return EngineSpec(
        config.model.path,
        config.generator,
        seed=config.run.seed + (team.leader if team else replica),
        max_length=max_length,
        drains=config.weights.on_update == "drain",
        keeps_kv=config.weights.kv == "keep",
        team=team,
    )


def _task(config: RunConfig, max_length: int, role: str) -> "Task":
    from streamrl.engines.models.forward import ModelOptions
    from streamrl.engines.training.tasks import CriticTask, PolicyTask, TwoHeadedTask

    path, row, settings = config.model_of(role), config.algorithm.row, config.settings
    options = ModelOptions(config.trainer_of(role).attention, max_length)
    temperature, clip = config.generator.temperature, config.critic.value_clip
    if role == POLICY and config.critic.shared_coef is not None:
        coef = config.critic.shared_coef
        return TwoHeadedTask(
            path, row, settings, temperature, options=options, value_clip=clip, value_coef=coef
        )
    if role == POLICY:
        return PolicyTask(path, row, settings, temperature, options=options)
    return CriticTask(path, row, settings, clip, role, options)


def _pretraining(config: RunConfig) -> "Pretraining":
    from streamrl.data import TextStream, load_texts, load_tokenizer
    from streamrl.engines.training.pretraining import Pretraining
    from streamrl.files.hf_config import model_length

    budget = config.pipeline.micro_batch_tokens
    return Pretraining(
        TextStream(load_texts(config.data.pretrain), seed=config.run.seed),
        load_tokenizer(config.model.path),
        coef=config.algorithm.ptx_coef,
        rows=config.algorithm.ptx_rows,
        max_tokens=min(budget, model_length(config.model.path, limit=config.model.max_length)),
        micro_batch_tokens=budget,
    )


def _rewards(config: RunConfig, max_length: int) -> HostedScorer:
    from streamrl.data import load_tokenizer
    from streamrl.rewards import Surroundings, build_rewards
    from streamrl.rewards.group_filter import build_filter
    from streamrl.rewards.scorer import RewardScorer

    rewards = build_rewards(config.rewards, Surroundings(config.scorer, config.sandbox))
    scorer = RewardScorer(rewards, load_tokenizer(config.model.path), build_filter(config.filter))
    stages = {REWARD.stage: scorer.score, BASELINE.stage: scorer.baseline}
    return HostedScorer(
        stages,
        drain_samples=scorer.drain_samples,
        drain_counts=rewards.drain_counts,
        start=rewards.start,
        close=rewards.close,
    )


def _costs(config: RunConfig, max_length: int) -> HostedScorer:
    from streamrl.data import load_tokenizer
    from streamrl.rewards import COSTS, Surroundings, build_rewards
    from streamrl.rewards.scorer import CostScorer

    around = Surroundings(config.scorer, config.sandbox)
    costs = build_rewards(config.costs, around, judged=COSTS)
    scorer = CostScorer(costs, load_tokenizer(config.model.path))
    return HostedScorer(
        {COST.stage: scorer.score},
        drain_counts=costs.drain_counts,
        start=costs.start,
        close=costs.close,
    )


def _reference(config: RunConfig, max_length: int) -> HostedScorer:
    from streamrl.engines.models.forward import ModelOptions
    from streamrl.engines.training.forward_scorers import LogprobScorer

    model = LogprobScorer(
        config.model.path,
        temperature=config.generator.temperature,
        micro_batch_tokens=config.pipeline.micro_batch_tokens,
        threads=config.trainer.threads,
        dtype=config.trainer.dtype,
        options=ModelOptions(config.trainer.attention, max_length),
    )
    shadow = Shadow(model.ref_logprobs, model.load_weights)
    return HostedScorer({REFERENCE.stage: shadow.score}, shadow)


def _shadow(call: Call, config: RunConfig, max_length: int) -> HostedScorer:
    from streamrl.engines.models.forward import ModelOptions
    from streamrl.engines.training.forward_scorers import ValueScorer

    shares = config.critic.shared_coef is not None
    role, (column,) = POLICY if shares else call.follows, call.produces
    trainer = config.trainer_of(role)
    model = ValueScorer(
        config.model_of(role),
        micro_batch_tokens=config.pipeline.micro_batch_tokens,
        threads=trainer.threads,
        dtype=trainer.dtype,
        shares_policy=shares,
        options=ModelOptions(trainer.attention, max_length),
    )
    shadow = Shadow(lambda columns: {column: model.values(columns)}, model.load_weights)
    return HostedScorer({call.stage: shadow.score}, shadow)


SCORERS: Mapping[str, Callable[[RunConfig, int], HostedScorer]] = {
    "reward": _rewards,
    "cost": _costs,
    "reference": _reference,
    "value": partial(_shadow, VALUE),
    "cost_value": partial(_shadow, COST_VALUE),
}
