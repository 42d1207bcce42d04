"""Engines with a model, made from the config of a run; imports torch."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from streamrl.config.run_config import RunConfig, count_trained_steps
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.pretrain_texts import TextStream, load_texts
from streamrl.dataflow import COST_VALUE_CALL, POLICY, REFERENCE_CALL, VALUE_CALL, ModelCall
from streamrl.distributed.devices import has_run_gpus
from streamrl.engines.models.forward import ModelLoadOptions
from streamrl.engines.training.forward_scorers import LogprobScorer, ValueScorer
from streamrl.engines.training.model_trainer import ModelTrainer
from streamrl.engines.training.pretraining import PretrainingLoss
from streamrl.engines.training.tasks import CriticTask, PolicyTask, TrainingTask, TwoHeadedTask
from streamrl.files.hf_config import read_model_length
from streamrl.messages import Array, Columns, Experience
from streamrl.stream.stage_worker import HostedScorer, StageResult
from streamrl.weights import WeightLoadStats


class FollowerScorer:
    """Stage that scores with a copy of a trained model, with its newest loaded version."""

    def __init__(
        self, compute: Callable[[Columns], Columns], load: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Wrap a model.

        compute: computes the columns of a group with the model.
        load: loads the tensors of another version into the model.
        """
        self._compute_columns = compute
        self._load_tensors = load
        self._lock = asyncio.Lock()

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        async with self._lock:
            return [
                await asyncio.to_thread(self._compute_columns, experience.columns)
                for experience in experiences
            ]

    async def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> WeightLoadStats:
        async with self._lock:
            started = time.perf_counter()
            await asyncio.to_thread(self._load_tensors, tensors)
            return WeightLoadStats(pause_s=time.perf_counter() - started)

    async def compute_logprobs(self, sequences: Sequence[Array]) -> None:
        """Return None: a scorer does not sample, so the logprob check does not apply."""


def make_model_trainer(config: RunConfig, max_length: int, rank: int, role: str) -> ModelTrainer:
    has_pretraining = role == POLICY and bool(config.data.pretrain)
    return ModelTrainer(
        _make_task(config, max_length, role),
        config=config.get_trainer_config(role),
        rank=rank,
        pretraining=_make_pretraining(config) if has_pretraining else None,
        num_steps=count_trained_steps(config, role),
    )


def _make_task(config: RunConfig, max_length: int, role: str) -> TrainingTask:
    """Make the loss of a trained role: policy, critic, or a policy with a value head."""
    path, spec, settings = (
        config.get_model_path(role),
        config.algorithm.spec,
        config.algorithm_settings,
    )
    options = ModelLoadOptions(config.get_trainer_config(role).attention, max_length)
    temperature, clip = config.generator.temperature, config.critic.value_clip
    if role == POLICY and config.critic.shared_coef is not None:
        coef = config.critic.shared_coef
        return TwoHeadedTask(
            path, spec, settings, temperature, options=options, value_clip=clip, value_coef=coef
        )
    if role == POLICY:
        return PolicyTask(path, spec, settings, temperature, options=options)
    return CriticTask(path, spec, settings, clip, name=role, options=options)


def _make_pretraining(config: RunConfig) -> PretrainingLoss:
    """Make the pretraining loss that is mixed into policy updates (algorithm.ptx_coef)."""
    budget = config.pipeline.micro_batch_tokens
    return PretrainingLoss(
        TextStream(load_texts(config.data.pretrain), seed=config.run.seed),
        load_tokenizer(config.model.path),
        coef=config.algorithm.ptx_coef,
        num_texts=config.algorithm.ptx_rows,
        max_tokens=min(budget, read_model_length(config.model.path, limit=config.model.max_length)),
        micro_batch_tokens=budget,
    )


def _make_reference_scorer(config: RunConfig, max_length: int) -> HostedScorer:
    model = LogprobScorer(
        config.model.path,
        temperature=config.generator.temperature,
        micro_batch_tokens=config.pipeline.micro_batch_tokens,
        threads=config.trainer.resolve_threads(on_gpu=has_run_gpus()),
        dtype=config.trainer.dtype,
        options=ModelLoadOptions(config.trainer.attention, max_length, config.scorer.offload),
    )
    follower = FollowerScorer(model.compute_ref_logprobs, model.copy_weights)
    return HostedScorer({REFERENCE_CALL.stage: follower.score}, follower)


def _make_value_scorer(call: ModelCall, config: RunConfig, max_length: int) -> HostedScorer:
    shares_policy = config.critic.shared_coef is not None
    role, (column,) = POLICY if shares_policy else call.followed_role, call.produces
    trainer_config = config.get_trainer_config(role)
    model = ValueScorer(
        config.get_model_path(role),
        micro_batch_tokens=config.pipeline.micro_batch_tokens,
        threads=trainer_config.resolve_threads(on_gpu=has_run_gpus()),
        dtype=trainer_config.dtype,
        shares_policy=shares_policy,
        options=ModelLoadOptions(trainer_config.attention, max_length, config.scorer.offload),
    )
    follower = FollowerScorer(
        lambda columns: {column: model.compute_values(columns)}, model.copy_weights
    )
    return HostedScorer({call.stage: follower.score}, follower)


SCORER_FACTORIES: Mapping[str, Callable[[RunConfig, int], HostedScorer]] = {
    REFERENCE_CALL.role: _make_reference_scorer,
    VALUE_CALL.role: partial(_make_value_scorer, VALUE_CALL),
    COST_VALUE_CALL.role: partial(_make_value_scorer, COST_VALUE_CALL),
}
