"""Pickles that older versions wrote, read as plain values and tensors: nothing else in them is."""

import warnings
from pathlib import Path
from typing import Any

import torch

from streamrl.errors import CheckpointError
from streamrl.files.bounded_read import open_regular_file


def load_plain_pickle(path: Path) -> Any:
    """Load tensors and plain values onto the CPU. Raises CheckpointError for anything else."""
    try:
        with open_regular_file(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a hostile one would have torch say more than a line
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    # What is no pickle of torch's is told by errors of many kinds; of the words of those that are,
    # some advise to execute it.
    except Exception as error:
        raise make_unsafe_pickle_error(path) from error


def make_unsafe_pickle_error(path: Path) -> CheckpointError:
    """What to say of a pickle that is not loaded."""
    return CheckpointError(
        f"{path} holds more than plain data, or is damaged: nothing of it is loaded or executed;"
        " go on from another checkpoint, or start a new run from its model (model.path)"
    )
