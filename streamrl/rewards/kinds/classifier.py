"""Sequence-classification models: check a directory without loading weights, load, run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from streamrl.data.chat_template import load_tokenizer
from streamrl.distributed.devices import get_local_device
from streamrl.engines.dtypes import resolve_dtype
from streamrl.engines.models.layer_offload import keep_layers_on_host
from streamrl.errors import ConfigError, RewardMemoryError
from streamrl.files.hf_config import is_trusted, read_model_config, read_stored_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ClassifierFiles:
    """Metadata of a directory with a sequence-classification model.

    max_tokens: longest input, None if the config does not limit the length.
    pad_id: id of the padding token, None if the model has no padding token.
    weight_bytes: size of the stored weights.
    """

    path: str
    setting: str
    config: Any
    tokenizer: "PreTrainedTokenizerBase"
    max_tokens: int | None
    pad_id: int | None
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
    vocab_size, pad_id = settings["vocab_size"], settings.get("pad_token_id")
    max_id = max(tokenizer.get_vocab().values())
    if max_id >= vocab_size:
        raise _make_config_error(
            path,
            setting,
            f"the tokenizer has token id {max_id}, the model's vocab_size is {vocab_size}:"
            " tokenizer and model do not match",
        )
    return ClassifierFiles(
        path=path,
        setting=setting,
        config=config,
        tokenizer=tokenizer,
        max_tokens=settings.get("max_position_embeddings"),
        # Some configs have an invalid id such as -1.
        pad_id=pad_id if pad_id in range(vocab_size) else None,
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


class SequenceClassifier:
    """A loaded sequence-classification model, on the GPU if this process has one.

    Use only from the thread that creates the object. Raises ConfigError if loading fails or
    parameters are missing. keeps_layers_on_host: see ModelLoadOptions.
    """

    def __init__(
        self, files: ClassifierFiles, *, dtype: str, keeps_layers_on_host: bool = False
    ) -> None:
        torch.set_num_threads(1)
        disable_progress_bar()
        config = files.config
        if "use_cache" in config.to_dict():
            config.use_cache = False  # no KV cache: a classifier never decodes further tokens
        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(
                files.path,
                config=config,
                dtype=resolve_dtype(dtype),
                local_files_only=True,
                trust_remote_code=is_trusted(files.path),
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise _make_config_error(
                files.path, files.setting, f"cannot be loaded: {error}"
            ) from error
        if missing := sorted(info["missing_keys"]):
            first = ", ".join(missing[:3])
            raise _make_config_error(
                files.path, files.setting, f"lacks {len(missing)} parameters, e.g. {first}"
            )
        self._model = model.eval()
        self._device = get_local_device()
        if keeps_layers_on_host:
            keep_layers_on_host(model)
        else:
            self._model.to(self._device)
        self._pad_id = files.pad_id or 0

    def compute_logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each row of token ids. Raises RewardMemoryError."""
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.full(mask.shape, self._pad_id)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        device = self._device
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=ids.to(device), attention_mask=mask.long().to(device)
                )
                logits: list[float] = output.logits[:, 0].float().tolist()
        except torch.OutOfMemoryError as error:
            shape = f"{len(rows)} texts of up to {int(lengths.max())} tokens"
            raise RewardMemoryError(f"{shape}: {str(error).splitlines()[0]}") from error
        return logits
