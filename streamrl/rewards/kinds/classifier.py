"""A sequence-classification model in a directory: checked without its weights, loaded, asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from streamrl.data import load_tokenizer
from streamrl.engines.dtypes import resolve_dtype
from streamrl.engines.models.forward import get_local_device
from streamrl.errors import ConfigError, RewardMemoryError
from streamrl.files.hf_config import is_trusted, read_model_config, read_stored_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ClassifierFiles:
    """A directory that holds a sequence-classification model.

    labels: their names, one where the model gives one number. tokens: most the model takes, or None
    where it does not say. pad_id: of the token that its inputs are padded with, if it has one.
    weight_bytes: size of its weights as stored.
    """

    path: str
    tokenizer: "PreTrainedTokenizerBase"
    labels: tuple[str, ...]
    max_tokens: int | None
    pad_id: int | None
    weight_bytes: int


def read_classifier(path: str) -> ClassifierFiles:
    """What a directory holds. Raises ConfigError if that is no such model, whole, with a tokenizer.

    A language model is none: transformers would give it a head of random numbers.
    """
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"rewards.path={error}") from None
    config = _read_config(path)
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise _make_config_error(path, "holds no .safetensors file")
    _check_head(path, config)
    settings = config.get_text_config().to_dict()
    known, pad_id = settings["vocab_size"], settings.get("pad_token_id")
    largest = max(tokenizer.get_vocab().values())
    if largest >= known:
        raise _make_config_error(
            path,
            f"its tokenizer gives token id {largest}, the model knows ids below {known}: they do"
            " not belong together",
        )
    return ClassifierFiles(
        path=path,
        tokenizer=tokenizer,
        labels=tuple(config.id2label[i] for i in range(config.num_labels)),
        max_tokens=settings.get("max_position_embeddings"),
        # Some configs name one that there is not, such as -1.
        pad_id=pad_id if pad_id in range(known) else None,
        weight_bytes=sum(file.stat().st_size for file in files),
    )


def _make_config_error(path: str, reason: object) -> ConfigError:
    return ConfigError(f"rewards.path={path}: {' '.join(str(reason).split())[:500]}")


def _read_config(path: str) -> Any:
    try:
        return read_model_config(path)
    except ConfigError as error:
        raise ConfigError(f"rewards.path={error}") from None


def _check_head(path: str, config: Any) -> None:
    """Raise ConfigError unless the files have what makes numbers of the model's last layer."""
    try:
        with torch.device("meta"):
            skeleton = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=is_trusted(path)
            )
    except (ValueError, TypeError, AttributeError) as error:
        raise _make_config_error(path, error) from None
    body = f"{skeleton.base_model_prefix}."
    parameters = skeleton.state_dict().items()
    head = {name: tuple(value.shape) for name, value in parameters if not name.startswith(body)}
    stored = read_stored_shapes(Path(path), "rewards.path")
    for name, shape in head.items():
        if name not in stored:
            kind = (config.architectures or ["a model"])[0]
            raise _make_config_error(
                path,
                f"{kind} without a classification head (its files lack {name}): a reward model is"
                " trained as a sequence-classification model",
            )
        if stored[name] != shape:
            raise _make_config_error(
                path, f"{name} has shape {stored[name]}, config.json says {shape}"
            )


class SequenceClassifier:
    """The model, on the GPU of this process if it has one. Belongs to the thread that makes it."""

    def __init__(self, files: ClassifierFiles, *, dtype: str, threads: int) -> None:
        """Load it. Raises ConfigError if that cannot be, or the directory lacks parameters."""
        torch.set_num_threads(threads)
        disable_progress_bar()
        config = _read_config(files.path)
        if "use_cache" in config.to_dict():
            config.use_cache = False  # of keys and values, for more tokens than there will be
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
            raise _make_config_error(files.path, f"cannot be loaded: {error}") from error
        if missing := sorted(info["missing_keys"]):
            first = ", ".join(missing[:3])
            raise _make_config_error(files.path, f"lacks {len(missing)} parameters, as {first}")
        self._model = model.to(get_local_device()).eval()
        self._pad_id = files.pad_id or 0

    def compute_logits(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """A number per label for each row of token ids, padded on the right.

        Raises RewardMemoryError if the GPU has not the memory for them.
        """
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.full(mask.shape, self._pad_id)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        device = self._model.device
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=ids.to(device), attention_mask=mask.long().to(device)
                )
                found: list[list[float]] = output.logits.float().tolist()
        except torch.OutOfMemoryError as error:
            shape = f"{len(rows)} texts of up to {int(lengths.max())} tokens"
            raise RewardMemoryError(f"{shape}: {str(error).splitlines()[0]}") from error
        return found
