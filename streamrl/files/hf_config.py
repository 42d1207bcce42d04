"""What a model directory says of its model: config.json, and the headers of its weights."""

import importlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import MIB, read_small_json, read_small_text, wrap_file_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


TRUSTED_MODELS_ENV = "STREAMRL_TRUSTED_MODELS"
"""Names the model directories whose own code may be run, for all processes of a run."""
GENERATION_CONFIG = "generation_config.json"
MAX_DESCRIPTION_BYTES = 512 * MIB
"""Of a file that says what a model is; the largest are tokenizers."""
DESCRIPTION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
MAX_LAYERS = 10_000
MAX_INDEX_BYTES = 256 << 20
PRESCALED_ROPE_TYPES = ("default", "llama3", "longrope", "su", "dynamic")
"""Kinds of rotary positions whose scaling max_position_embeddings includes, or that scale by the
length at hand in transformers, and by the longest there may be in vLLM."""


def _get_config_error_types() -> tuple[type[Exception], ...]:
    """Return what transformers may raise of a config.json that is wrong."""
    from huggingface_hub.errors import StrictDataclassError

    wrong = (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)
    return (*wrong, RecursionError, StrictDataclassError)


def make_trusted_env(*paths: str) -> dict[str, str]:
    """Return what lets a process run the code that these model directories bring, if any."""
    trusted = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    return {TRUSTED_MODELS_ENV: trusted} if trusted else {}


def is_trusted(path: str) -> bool:
    """Whether code that a model directory brings (`auto_map`) may be run in this process."""
    trusted = os.environ.get(TRUSTED_MODELS_ENV, "").split(os.pathsep)
    return str(Path(path).absolute()) in trusted


def read_model_config(path: str, **changes: Any) -> "PreTrainedConfig":
    """Read the config of the model in a directory, with some of its settings changed.

    Raises ConfigError if the config is wrong, or takes code of the directory's own that is not
    trusted.
    """
    from transformers import AutoConfig

    if not Path(path).is_dir():
        raise ConfigError(f"{path}: no such directory")
    check_regular_files(Path(path))
    num_layers = read_num_layers(Path(path))
    if num_layers > MAX_LAYERS:
        raise ConfigError(f"{path}: config.json says {num_layers} layers: at most {MAX_LAYERS}")
    try:
        with _skip_model_classes():
            return AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=is_trusted(path), **changes
            )
    except _get_config_error_types() as error:
        reason = " ".join(str(error).split())
        raise make_untrusted_error(path, error) or ConfigError(
            f"{path}: config.json: {reason}"
        ) from None


def check_regular_files(path: Path) -> None:
    """Raise ConfigError for what libraries would read for ever in a model's directory."""
    with wrap_file_errors(path):
        files = sorted(path.iterdir())
    for file in files:
        try:
            found = file.stat()
        except OSError:
            continue  # a link to nowhere, of which the one that reads it tells
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{file}: not a regular file")
        if file.suffix in DESCRIPTION_SUFFIXES and found.st_size > MAX_DESCRIPTION_BYTES:
            most = MAX_DESCRIPTION_BYTES // MIB
            raise ConfigError(f"{file}: more than {most} MiB: must be at most that")


def make_untrusted_error(path: str, error: Exception) -> ConfigError | None:
    """Say in one line that a directory brings code that is not run, if that is the error."""
    if "trust_remote_code" not in str(error):
        return None
    return ConfigError(
        f"{path}: brings code of its own (auto_map), which is not run;"
        " model.trust_remote_code=true runs that of model.path and critic.path"
    )


def read_model_length(path: str, *, limit: int | None) -> int:
    """Tokens a model takes, or `limit` if that is less. Raises ConfigError for what is no model."""
    try:
        config = read_model_config(path)
    except ConfigError as error:
        raise ConfigError(f"model.path={error}") from None
    try:
        tokens = compute_max_positions(config)
    except _get_config_error_types() as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.path={path}: config.json: {reason}") from None
    _check_generation_config(Path(path), int(config.get_text_config().vocab_size))
    if limit is not None and limit > tokens:
        raise ConfigError(f"model.max_length={limit}: the model takes at most {tokens} tokens")
    return tokens if limit is None else limit


def _check_generation_config(path: Path, vocab_size: int) -> None:
    """Raise ConfigError for defaults of generation that vLLM refuses, or leaves out unsaid.

    Temperatures beside greedy decoding, of which transformers warns, mean nothing to a run.
    """
    if not (path / GENERATION_CONFIG).is_file():
        return
    from transformers import GenerationConfig

    try:
        with silence_transformers():
            found = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except _get_config_error_types() as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.path={path}: {GENERATION_CONFIG}: {reason}") from None
    ends = found if isinstance(found, list) else [found]
    if not all(end is None or (isinstance(end, int) and 0 <= end < vocab_size) for end in ends):
        raise ConfigError(
            f"model.path={path}: {GENERATION_CONFIG}: eos_token_id={found!r}: must be token ids, of"
            f" which the model has {vocab_size}"
        )


def compute_max_positions(config: "PreTrainedConfig") -> int:
    """Return the most tokens a model takes, the scaling of its rotary positions included."""
    settings = config.get_text_config()
    tokens = int(settings.max_position_embeddings)
    scaled = [
        int(float(rope["factor"]) * _get_original_positions(rope, tokens))
        for rope in _list_rope_parameters(settings)
        if rope.get("rope_type") not in PRESCALED_ROPE_TYPES and rope.get("factor")
    ]
    # The positions of Gemma-3 are given scaled, whatever their kind.
    return tokens if "gemma3" in settings.model_type else max([tokens, *scaled])


def _list_rope_parameters(settings: Any) -> list[Mapping[str, Any]]:
    """Return the rotary parameters of all kinds of layers."""
    found = settings.to_dict().get("rope_parameters") or {}
    return [found] if "rope_type" in found else [one for one in found.values() if one]


def _get_original_positions(rope: Mapping[str, Any], tokens: int) -> int:
    """Return the positions before scaling: YaRN names them, other kinds scale all there are."""
    return int(rope.get("original_max_position_embeddings") or tokens)


def read_num_layers(path: Path) -> int:
    """Read how many layers a config.json says, before transformers lists each; 0 if it does not."""
    try:
        config = json.loads(read_small_text(path / "config.json"))
        settings = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, RecursionError, TypeError, AttributeError):
        return 0
    counts = [settings.get(name) for name in ("num_hidden_layers", "num_layers", "n_layer")]
    return max((count for count in counts if isinstance(count, int)), default=0)


LAYER_NUMBER_PATTERN = re.compile(r"\.(\d+)\.")
"""The number of a layer in the name of a parameter."""


RECOMPUTED_TENSORS = re.compile(r"rotary_emb\.|\.(attention|attn)\.(masked_)?bias$")
"""Tensors in files of older versions that a model computes anew, whatever the files say."""


def list_weight_files(path: Path) -> list[Path]:
    """Name the files that a directory's weights are in: those of its index, or the only one.

    Others beside an index may hold the same weights once more, as the consolidated file of
    Mistral's does. Raises ConfigError for files that are not there, or that vLLM alone would read.
    """
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        try:
            found = read_small_json(index, most_bytes=MAX_INDEX_BYTES)["weight_map"].values()
            named = [path / name for name in sorted({*found})]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: no index of weights: {error}") from None
        if missing := [file.name for file in named if file not in files]:
            raise ConfigError(f"{index}: names {missing[0]}, which is not beside it")
        if whole in files and whole not in named:
            raise ConfigError(
                f"{path}: model.safetensors is not in the index beside it: transformers reads the"
                " one, vLLM what the other names; remove one of them"
            )
        return named
    if files and files != [whole]:
        other = next(file.name for file in files if file != whole)
        raise ConfigError(
            f"{path}: without an index its weights are those of model.safetensors alone, but there"
            f" is {other}: move it elsewhere, or add model.safetensors.index.json"
        )
    return files


class StoredTensor(NamedTuple):
    """What the header of a safetensors file says of a tensor; dtype as F32, BF16, I8 and so on."""

    shape: tuple[int, ...]
    dtype: str


def read_stored_tensors(path: Path, key: str) -> dict[str, StoredTensor]:
    """Read what the headers of a directory's safetensors files say of all their tensors.

    Raises ConfigError, beginning with `key`, if there are none or a header cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_dir():
        raise ConfigError(f"{key}={path}: no such directory")
    check_regular_files(path)
    files = list_weight_files(path)
    if not files:
        raise ConfigError(f"{key}={path}: holds no .safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    stored = opened.get_slice(name)
                    tensors[name] = StoredTensor(tuple(stored.get_shape()), stored.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{key}={path}: {file.name}: {error}") from None
    return tensors


def read_stored_shapes(path: Path, key: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes alone, and raise as `read_stored_tensors` does."""
    return {name: tensor.shape for name, tensor in read_stored_tensors(path, key).items()}


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Have transformers say nothing of what it finds, and show no bar, for the moment."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def _skip_model_classes() -> Iterator[None]:
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
