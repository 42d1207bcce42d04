"""Map the dtype names of the configuration to torch dtypes."""

import torch

from streamrl.distributed.devices import has_run_gpus
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.trainer_config import TrainerConfig

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOAT32_SETTINGS = ("auto", "float32")
"""Values of generator.dtype that mean float32 on a CPU."""


def resolve_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a config value; auto is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if has_run_gpus() else torch.float32
    return TORCH_DTYPES[name]


def resolve_trainer_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype in which a trainer computes and publishes its model."""
    return resolve_dtype(config.dtype) if config.has_master_weights else torch.float32


def resolve_loading_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype in which a trainer loads its model; backend torch makes bfloat16 copies."""
    return torch.float32 if config.backend == "torch" else resolve_trainer_dtype(config)


def is_float32_on_cpu(trainer: TrainerConfig, generator: GeneratorConfig) -> bool:
    both_float32 = (
        generator.dtype in FLOAT32_SETTINGS and resolve_trainer_dtype(trainer) == torch.float32
    )
    return both_float32 and not has_run_gpus()
