"""Map the dtype names of the configuration to torch dtypes."""

import torch

from streamrl.distributed.devices import has_run_gpus
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.trainer_config import TrainerConfig

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_trainer_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype in which a trainer computes and publishes its model."""
    return TORCH_DTYPES[config.resolve_dtype(on_gpu=has_run_gpus())]


def resolve_loading_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the dtype in which a trainer loads its model; backend torch makes bfloat16 copies."""
    return torch.float32 if config.backend == "torch" else resolve_trainer_dtype(config)


def is_float32_on_cpu(trainer: TrainerConfig, generator: GeneratorConfig) -> bool:
    dtypes = {config.resolve_dtype(on_gpu=False) for config in (trainer, generator)}
    return dtypes == {"float32"} and not has_run_gpus()
