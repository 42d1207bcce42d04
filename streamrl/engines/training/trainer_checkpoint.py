"""Save a trainer; load a trainer saved in today's format or in the format of earlier versions.

The latter is called the old format.
"""

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from streamrl.distributed.devices import set_gpu_rng_state
from streamrl.engines.checkpoint.legacy_pickles import load_plain_pickle, make_unsafe_pickle_error
from streamrl.engines.checkpoint.sharded_state import (
    PROGRESS_FILE,
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

LEGACY_FIELDS = {"layout": str, "num_updates": int, "rng": torch.Tensor}
"""Required fields, and their types, of a rank's file in the old format; cuda_rng may be None."""


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
    if not (directory / PROGRESS_FILE).is_file() and list(directory.glob("rank_*.pt")):
        return _load_legacy_state(directory, rank, backend, config)
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


def _load_legacy_state(
    directory: Path, rank: int, backend: "TrainingBackend", config: TrainerConfig
) -> int:
    """Load one rank's state in the format of earlier versions; return the number of updates.

    That format depends on backend, ZeRO stage and number of ranks.
    """
    path, layout = directory / f"rank_{rank}.pt", describe_layout(config)
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no trainer state of rank {rank}")
    try:
        progress = load_legacy_progress(path)
        if progress["layout"] != layout:
            raise CheckpointError(
                f"{directory} was written with {progress['layout']}, not {layout}; a checkpoint of"
                " this old format can only be loaded with the same layout"
            )
        backend.load_legacy_state(directory)
    except pickle.UnpicklingError as error:
        raise make_unsafe_pickle_error(directory) from error
    torch.set_rng_state(progress["rng"])
    set_gpu_rng_state(progress["cuda_rng"])
    num_updates: int = progress["num_updates"]
    return num_updates


def load_legacy_progress(path: Path) -> dict[str, Any]:
    """Load rank_N.pt, the format before trainer.json: number of updates, layout, random states.

    Raises CheckpointError for any other content.
    """
    fields = load_plain_pickle(path)
    is_progress = isinstance(fields, dict) and "cuda_rng" in fields
    if not is_progress or not all(
        isinstance(fields.get(key), kind) for key, kind in LEGACY_FIELDS.items()
    ):
        raise CheckpointError(f"{path}: not a trainer's state of the old format")
    return fields


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
