"""What a model directory says of its model: config.json, and the headers of its weights."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_model_config(path: str) -> "PreTrainedConfig":
    """The config of the model in a directory. Raises what transformers raises of a wrong one."""
    from transformers import AutoConfig

    with _without_model_classes():
        return AutoConfig.from_pretrained(path, local_files_only=True)


def model_length(path: str, *, limit: int | None) -> int:
    """Tokens a model takes, or `limit` if that is less. Raises ConfigError for what is no model."""
    check_weights(Path(path))
    from huggingface_hub.errors import StrictDataclassError

    try:
        settings = read_model_config(path).get_text_config()
        tokens = int(settings.max_position_embeddings)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        raise ConfigError(f"model.path={path}: {' '.join(str(error).split())}") from None
    if limit is not None and limit > tokens:
        raise ConfigError(f"model.max_length={limit}: the model takes at most {tokens} tokens")
    return tokens if limit is None else limit


def check_weights(path: Path, key: str = "model.path") -> None:
    """Raise ConfigError unless the directory holds safetensors files with readable headers."""
    from safetensors import SafetensorError, safe_open

    if not path.is_dir():
        raise ConfigError(f"{key}={path}: no such directory")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{key}={path}: holds no .safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                opened.keys()
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{key}={path}: {file.name}: {error}") from None


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
