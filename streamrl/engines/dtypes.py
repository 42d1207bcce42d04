"""Types of weights and activations by the names that settings have for them."""

import torch

from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.trainer_config import TrainerConfig

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOAT32_SETTINGS = ("auto", "float32")
"""Settings of the generator's dtype that are float32 on a CPU."""


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of that name; auto is bfloat16 on a GPU and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return TORCH_DTYPES[name]


def resolve_trainer_dtype(config: TrainerConfig) -> torch.dtype:
    """What the parameters are held in on this machine."""
    return resolve_dtype(config.dtype) if config.has_master_weights else torch.float32


def is_float32_on_cpu(trainer: TrainerConfig, generator: GeneratorConfig) -> bool:
    """Whether trainer and generator both compute in float32 on this machine, without a GPU."""
    alike = generator.dtype in FLOAT32_SETTINGS and resolve_trainer_dtype(trainer) == torch.float32
    return alike and not torch.cuda.is_available()
