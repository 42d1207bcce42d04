"""Save and load a trainer."""

from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.engines.checkpoint.sharded_state import (
    TrainerProgress,
    load_state,
    read_progress,
    restore_rng,
    save_rng,
    save_state,
    write_progress,
)
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import CheckpointError
from streamrl.files.atomic_write import wrap_checkpoint_errors

if TYPE_CHECKING:
    from streamrl.engines.training.training_backend import TrainingBackend


def save_trainer(
    directory: Path, rank: int, backend: "TrainingBackend", config: TrainerConfig, num_updates: int
) -> None:
    """Write one rank's parameters, optimizer state and random state into a checkpoint directory.

    `num_updates` is the number of updates made so far. Raises NoSpaceError if the disk is full,
    else CheckpointError.
    """
    with wrap_checkpoint_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        step = save_state(directory, rank, backend.iter_fragments(), backend.optimizer)
        save_rng(directory, rank)
        if rank == 0:
            progress = TrainerProgress(
                num_updates, step, describe_layout(config), _describe_adapters(config)
            )
            write_progress(directory, progress)


def load_trainer(
    directory: Path, rank: int, backend: "TrainingBackend", config: TrainerConfig
) -> int:
    """Load one rank's state from a checkpoint of any number of ranks.

    Returns the number of updates that the saved trainer had made. Collective. Raises
    CheckpointError if the state belongs to another model or other adapters.
    """
    progress, adapters = read_progress(directory), _describe_adapters(config)
    if progress.adapters != adapters:
        saved_text, current_text = (
            description or "no adapters" for description in (progress.adapters, adapters)
        )
        raise CheckpointError(f"{directory} was written with {saved_text}, not {current_text}")
    load_state(
        directory, progress.step, backend.iter_fragments(), backend.optimizer, backend.iter_shards()
    )
    backend.refresh_params()
    restore_rng(directory, rank)
    return progress.num_updates


def describe_layout(config: TrainerConfig) -> str:
    has_stages = config.backend == "deepspeed" or config.has_sharded_params
    stage = f" zero_stage={config.zero_stage}" if has_stages else ""
    tensor = f" tensor_parallel={config.tensor_parallel}" if config.tensor_parallel > 1 else ""
    adapters = _describe_adapters(config)
    lora = f" {adapters}" if adapters else ""
    return f"backend={config.backend}{stage} world_size={config.world_size}{tensor}{lora}"


def _describe_adapters(config: TrainerConfig) -> str:
    settings = ("lora_rank", "lora_alpha", "lora_targets") if config.lora_rank else ()
    return " ".join(f"{name}={vars(config)[name]}" for name in settings)
