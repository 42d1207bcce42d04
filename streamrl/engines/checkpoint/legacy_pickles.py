"""Safe reading of the pickles that older versions wrote."""

import warnings
from pathlib import Path
from typing import Any

import torch

from streamrl.errors import CheckpointError
from streamrl.files.bounded_read import open_regular_file


def load_plain_pickle(path: Path) -> Any:
    """Load a pickle of tensors and plain values onto the CPU.

    Raises CheckpointError for any other content; torch's weights_only mode executes no code.
    """
    try:
        with open_regular_file(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a hostile pickle can make torch print long warnings
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    # A damaged or hostile file raises errors of many types. torch's own messages suggest
    # weights_only=False, which would execute the pickle, so none of the text is passed on.
    except Exception as error:
        raise make_unsafe_pickle_error(path) from error


def make_unsafe_pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds more than plain data, or is damaged: it was neither loaded nor executed;"
        " resume from another checkpoint, or start a new run from its model (model.path)"
    )
