"""What a model directory says of its model in config.json."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_model_config(path: str) -> "PreTrainedConfig":
    """The config of the model in a directory. Raises what transformers raises of a wrong one."""
    from transformers import AutoConfig

    with _without_model_classes():
        return AutoConfig.from_pretrained(path, local_files_only=True)


@contextmanager
def _without_model_classes() -> Iterator[None]:
    """Have transformers load no model's class with its config's.

    It does to name the class in a docstring, and what all models have in common takes two seconds.
    Meanwhile the docstring names the config in the model's place.
    """
    # The package has a function of the name of this module.
    places = importlib.import_module("transformers.utils.auto_docstring").PLACEHOLDER_TO_AUTO_MODULE
    place = places["model_class"]
    places["model_class"] = places["config_class"]
    try:
        yield
    finally:
        places["model_class"] = place
