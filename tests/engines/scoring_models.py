"""Models that only score, whole on this process."""

from typing import Any

from streamrl.algorithms import AlgorithmConfig
from streamrl.engines.models.chunked_head import TopWords
from streamrl.engines.models.forward import DEFAULT_OPTIONS, ModelLoadOptions
from streamrl.engines.trainer_config import RankLayout, TrainerConfig
from streamrl.engines.training.model_rank import ModelRank
from streamrl.engines.training.tasks import CriticTask, PolicyTask

PPO = AlgorithmConfig(name="ppo")
SETTINGS = PPO.to_settings(max_length=8, reward_weights={})
RANKS = RankLayout().to_trainer_config(TrainerConfig(dtype="float32"))


def make_reference(
    path: str,
    *,
    temperature: float = 0.8,
    options: ModelLoadOptions = DEFAULT_OPTIONS,
    top_words: TopWords | None = None,
) -> ModelRank:
    task = PolicyTask(path, PPO.spec, SETTINGS, temperature, top_words, options=options)
    return ModelRank(task, config=RANKS)


def make_shadow_critic(path: str, **facts: Any) -> ModelRank:
    return ModelRank(CriticTask(path, PPO.spec, SETTINGS, None, **facts), config=RANKS)
