"""Settings of DeepSpeed that depend on the model."""

import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.training_backend import make_deepspeed_config


def test_models_with_a_text_config_have_its_hidden_size_as_threshold():
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 16}
    vision = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1}
    with torch.device("meta"):
        module = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=sizes, vision_config=vision)
        )
    settings = make_deepspeed_config(module, TrainerConfig(zero_stage=3, world_size=2))
    assert settings["zero_optimization"]["stage3_param_persistence_threshold"] == 10 * 24
