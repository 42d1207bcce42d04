"""Engines with a model, made from the config of a run; imports torch."""

from streamrl.config.run_config import RunConfig, count_trained_steps
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.pretrain_texts import TextStream, load_texts
from streamrl.dataflow import POLICY, REFERENCE_CALL, ModelCall
from streamrl.engines.models.chunked_head import TopWords
from streamrl.engines.models.forward import ModelLoadOptions
from streamrl.engines.training.model_rank import ModelRank
from streamrl.engines.training.model_trainer import ModelTrainer
from streamrl.engines.training.pretraining import PretrainingLoss
from streamrl.engines.training.tasks import (
    CriticTask,
    ModelTask,
    PairTask,
    PolicyTask,
    TrainingTask,
    TwoHeadedTask,
)
from streamrl.files.hf_config import read_model_length, read_vocab_size
from streamrl.messages import PAIRS, REF_TOP_IDS
from streamrl.rewards.kinds.model import load_rank


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
    path = config.get_model_path(role)
    spec, settings = config.algorithm.spec, config.algorithm_settings
    options = ModelLoadOptions(config.get_trainer_config(role).attention, max_length)
    temperature, clip = config.temperature, config.critic.value_clip
    if role == POLICY and config.critic.shared_coef is not None:
        coef = config.critic.shared_coef
        return TwoHeadedTask(
            path, spec, settings, temperature, options=options, value_clip=clip, value_coef=coef
        )
    if role == POLICY:
        kind = PairTask if spec.trains_on == PAIRS else PolicyTask
        return kind(path, spec, settings, temperature, options=options)
    return CriticTask(path, spec, settings, clip, name=role, options=options)


def _find_top_words(config: RunConfig) -> TopWords | None:
    """Return which words of the reference the algorithm compares; None if it does not."""
    count = config.column_widths.get(REF_TOP_IDS)
    # The reference's vocabulary may be padded further than the policy's.
    return TopWords(count, read_vocab_size(config.model.path)) if count else None


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


def make_scoring_rank(config: RunConfig, max_length: int, rank: int, call: ModelCall) -> ModelRank:
    """Make a rank of a model that only scores: reference, shadow critic or split reward model."""
    if split := config.find_split_reward(call.role):
        return load_rank(split, rank)
    ranks = config.get_ranks_config(call)
    options = ModelLoadOptions(ranks.attention, max_length, config.scorer.offload)
    spec, settings = config.algorithm.spec, config.algorithm_settings
    task: ModelTask
    if call.role == REFERENCE_CALL.role:
        path, temperature = config.get_model_path(call.role), config.temperature
        task = PolicyTask(
            path, spec, settings, temperature, _find_top_words(config), options=options
        )
    else:
        shares_policy = call.followed_role == POLICY
        path = config.get_model_path(call.followed_role)
        clip = config.critic.value_clip
        task = CriticTask(path, spec, settings, clip, shares_policy=shares_policy, options=options)
    return ModelRank(task, config=ranks, rank=rank)
