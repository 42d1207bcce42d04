"""Check the directory of a sequence-classification model without loading its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForSequenceClassification

from streamrl.data.chat_template import load_tokenizer
from streamrl.errors import ConfigError
from streamrl.files.hf_config import is_trusted, read_model_config, read_stored_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ClassifierFiles:
    """Metadata of a directory with a sequence-classification model.

    max_tokens: longest input, None if the config does not limit the length.
    weight_bytes: size of the stored weights.
    """

    tokenizer: "PreTrainedTokenizerBase"
    max_tokens: int | None
    weight_bytes: int


def read_classifier(path: str, setting: str) -> ClassifierFiles:
    """Read the metadata of the model in directory `path` without loading weights.

    setting: config key that names the directory, for messages. Raises ConfigError unless the
    directory holds a complete model with classification head and tokenizer. A language model is
    refused: transformers would initialize its head randomly.
    """
    try:
        tokenizer, config = load_tokenizer(path), read_model_config(path)
    except ConfigError as error:
        raise ConfigError(f"{setting}={error}") from None
    _check_head(path, setting, config)
    if config.num_labels != 1:
        raise _make_config_error(
            path, setting, f"the model has {config.num_labels} labels, a reward model has one"
        )
    settings = config.get_text_config().to_dict()
    vocab_size = settings["vocab_size"]
    max_id = max(tokenizer.get_vocab().values())
    if max_id >= vocab_size:
        raise _make_config_error(
            path,
            setting,
            f"the tokenizer has token id {max_id}, the model's vocab_size is {vocab_size}:"
            " tokenizer and model do not match",
        )
    return ClassifierFiles(
        tokenizer=tokenizer,
        max_tokens=settings.get("max_position_embeddings"),
        weight_bytes=sum(file.stat().st_size for file in Path(path).glob("*.safetensors")),
    )


def _make_config_error(path: str, setting: str, reason: object) -> ConfigError:
    return ConfigError(f"{setting}={path}: {' '.join(str(reason).split())[:500]}")


def _check_head(path: str, setting: str, config: Any) -> None:
    try:
        with torch.device("meta"):
            skeleton = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=is_trusted(path)
            )
    except (ValueError, TypeError, AttributeError) as error:
        raise _make_config_error(path, setting, error) from None
    body = f"{skeleton.base_model_prefix}."
    parameters = skeleton.state_dict().items()
    head = {name: tuple(value.shape) for name, value in parameters if not name.startswith(body)}
    stored = read_stored_shapes(Path(path), setting)
    for name, shape in head.items():
        if name not in stored:
            kind = (config.architectures or ["a model"])[0]
            raise _make_config_error(
                path,
                setting,
                f"{kind} without a classification head (the files lack {name}): a reward model must"
                " be trained as a sequence-classification model",
            )
        if stored[name] != shape:
            raise _make_config_error(
                path, setting, f"{name} has shape {stored[name]}, config.json says {shape}"
            )
