"""Metadata of a model directory: config.json, generation config, headers of the weight files."""

import importlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from streamrl.errors import ConfigError, get_message
from streamrl.files.bounded_read import MIB, read_small_json, read_small_text, wrap_file_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


TRUSTED_MODELS_ENV = "STREAMRL_TRUSTED_MODELS"
"""Environment variable: model directories whose own code may run, for all processes of a run."""
GENERATION_CONFIG = "generation_config.json"
WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_DESCRIPTION_BYTES = 512 * MIB
"""Limit of a metadata file; tokenizers are the largest."""
DESCRIPTION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
MAX_LAYERS = 10_000
MAX_INDEX_BYTES = 256 << 20
PRESCALED_ROPE_TYPES = ("default", "llama3", "longrope", "su", "dynamic")
"""RoPE types that need no factor: max_position_embeddings already includes their scaling, or they
scale dynamically by the current length (transformers) or the maximum length (vLLM)."""


@contextmanager
def wrap_config_errors(path: str) -> Iterator[None]:
    """Convert any error of reading config.json to ConfigError: transformers raises many types."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise make_untrusted_error(path, error) or ConfigError(
            f"{path}: config.json: {get_message(error)}"
        ) from error


def make_trusted_env(*paths: str) -> dict[str, str]:
    """Return environment variables that let a process run code from model directories."""
    trusted = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    return {TRUSTED_MODELS_ENV: trusted} if trusted else {}


def is_trusted(path: str) -> bool:
    """Return whether Python code in a model directory (`auto_map`) may run in this process."""
    trusted = os.environ.get(TRUSTED_MODELS_ENV, "").split(os.pathsep)
    return str(Path(path).absolute()) in trusted


def read_model_config(path: str, **changes: Any) -> "PreTrainedConfig":
    """Read config.json of a model directory, with `changes` to some of its settings.

    Raises ConfigError for a malformed config, or one that requires untrusted code.
    """
    from transformers import AutoConfig

    check_regular_files(Path(path))
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path}: not a model directory: config.json is missing")
    num_layers = read_num_layers(Path(path))
    if num_layers > MAX_LAYERS:
        raise ConfigError(
            f"{path}: config.json has {num_layers} layers: must be at most {MAX_LAYERS}"
        )
    with wrap_config_errors(path), _skip_model_classes():
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=is_trusted(path), **changes
        )


def check_regular_files(path: Path) -> None:
    """Raise ConfigError without a directory, or if it contains a FIFO, a device or a huge file.

    Libraries would read such files forever.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; a model is a directory on this machine")
    with wrap_file_errors(path):
        files = sorted(path.iterdir())
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue  # a dangling link; the library that reads it reports it
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{file}: not a regular file")
        if file.suffix in DESCRIPTION_SUFFIXES and status.st_size > MAX_DESCRIPTION_BYTES:
            limit = MAX_DESCRIPTION_BYTES // MIB
            raise ConfigError(f"{file}: exceeds the limit of {limit} MiB")


def make_untrusted_error(path: str, error: Exception) -> ConfigError | None:
    """Return a ConfigError on untrusted code in a model directory, or None for other errors.

    error: exception of transformers, whose message about untrusted code names trust_remote_code.
    """
    if "trust_remote_code" not in str(error):
        return None
    return ConfigError(
        f"{path}: contains code of its own (auto_map), which is not trusted;"
        " model.trust_remote_code=true runs the code of model.path, critic.path and"
        " reference.path"
    )


def read_model_length(path: str, *, limit: int | None) -> int:
    """Return the context length of a model in tokens, or the smaller length `limit`.

    Raises ConfigError for a malformed config, or a `limit` above the context length.
    """
    with wrap_config_errors(path):
        config = read_model_config(path)
        tokens, vocab_size = compute_max_positions(config), int(config.get_text_config().vocab_size)
    # vLLM refuses or ignores other ids.
    token_ids = read_eos_token_ids(Path(path))
    if not all(isinstance(token_id, int) and 0 <= token_id < vocab_size for token_id in token_ids):
        raise ConfigError(
            f"{path}: {GENERATION_CONFIG}: eos_token_id={token_ids}: must be token ids below the"
            f" vocabulary size {vocab_size}"
        )
    if limit is not None and limit > tokens:
        raise ConfigError(f"model.max_length={limit}: the model takes at most {tokens} tokens")
    return tokens if limit is None else limit


def read_vocab_size(path: str) -> int:
    """Read the vocabulary size in a model directory's config.json. Raises ConfigError."""
    with wrap_config_errors(path):
        return int(read_model_config(path).get_text_config().vocab_size)


def read_eos_token_ids(path: Path) -> list[int]:
    """Read the EOS token ids in a model's generation_config.json; [] if it names none.

    Raises ConfigError for an unreadable file.
    """
    file = path / GENERATION_CONFIG
    if not file.is_file():
        return []
    with wrap_file_errors(file):
        settings = read_small_json(file)
        if not isinstance(settings, dict):
            raise ValueError("not a JSON object")
    token_ids = settings.get("eos_token_id")
    token_ids = token_ids if isinstance(token_ids, list) else [token_ids]
    return [token_id for token_id in token_ids if token_id is not None]


def compute_max_positions(config: "PreTrainedConfig") -> int:
    """Return the context length of a model in tokens, including RoPE scaling."""
    settings = config.get_text_config()
    tokens = int(settings.max_position_embeddings)
    parameters = settings.to_dict().get("rope_parameters") or {}
    # One mapping, or one per layer type.
    ropes = [parameters] if "rope_type" in parameters else filter(None, parameters.values())
    # YaRN states the length before scaling; other types scale max_position_embeddings.
    scaled = [
        int(float(rope["factor"]) * int(rope.get("original_max_position_embeddings") or tokens))
        for rope in ropes
        if rope.get("rope_type") not in PRESCALED_ROPE_TYPES and rope.get("factor")
    ]
    # Gemma-3 configs state max_position_embeddings after scaling, whatever the RoPE type.
    return tokens if "gemma3" in settings.model_type else max([tokens, *scaled])


def read_num_layers(path: Path) -> int:
    """Read the number of layers in a model's config.json; return 0 if absent.

    Callers check the number before transformers allocates memory for every layer.
    """
    try:
        config = json.loads(read_small_text(path / "config.json"))
        settings = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, RecursionError, TypeError, AttributeError):
        return 0
    counts = [settings.get(name) for name in ("num_hidden_layers", "num_layers", "n_layer")]
    return max((count for count in counts if isinstance(count, int)), default=0)


LAYER_NUMBER_PATTERN = re.compile(r"\.(\d+)\.")
"""Layer index inside a parameter name."""


RECOMPUTED_TENSORS = re.compile(r"rotary_emb\.|\.(attention|attn)\.(masked_)?bias$")
"""Tensors in old checkpoint files that a model recomputes and never loads."""


def list_weight_files(path: Path) -> list[Path]:
    """List the weight files of a directory: the files in its index, or model.safetensors.

    Files outside the index may duplicate the weights, like Mistral's consolidated file. Raises
    ConfigError for missing files, or files that vLLM would load and transformers would not.
    """
    index, single = path / WEIGHTS_INDEX, path / WEIGHTS_FILE
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        try:
            names = read_small_json(index, most_bytes=MAX_INDEX_BYTES)["weight_map"].values()
            named = [path / name for name in sorted({*names})]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: not a weight index: {error}") from None
        if missing := [file.name for file in named if file not in files]:
            raise ConfigError(f"{index}: names {missing[0]}, which is missing")
        if single in files and single not in named:
            raise ConfigError(
                f"{path}: model.safetensors is not in the index beside it; transformers would load"
                " the file, vLLM the index. Remove one of them"
            )
        return named
    if files and files != [single]:
        other = next(file.name for file in files if file != single)
        raise ConfigError(
            f"{path}: without an index only model.safetensors is loaded, but there"
            f" is {other}. Move it elsewhere, or add model.safetensors.index.json"
        )
    return files


class StoredTensor(NamedTuple):
    """Shape and dtype (F32, BF16, I8, ...) of a tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str


def read_stored_tensors(path: Path, key: str) -> dict[str, StoredTensor]:
    """Read shape and dtype of all tensors from the headers of a directory's safetensors files.

    key: setting that names the directory, for errors. Raises ConfigError for missing files or
    malformed headers.
    """
    check_regular_files(path)
    files = list_weight_files(path)
    if not files:
        raise ConfigError(f"{key}={path}: contains no .safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - safe_open is not iterable
                    stored = opened.get_slice(name)
                    tensors[name] = StoredTensor(tuple(stored.get_shape()), stored.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{key}={path}: {file.name}: {error}") from None
    return tensors


def read_stored_shapes(path: Path, key: str) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in read_stored_tensors(path, key).items()}


@contextmanager
def _skip_model_classes() -> Iterator[None]:
    """Context in which transformers imports config classes without their model classes.

    transformers imports a model class only to name it in a docstring, which costs two seconds. In
    the context the docstring names the config class instead.
    """
    # `transformers.utils.auto_docstring` as an attribute is a function; import the module by name.
    placeholders = importlib.import_module(
        "transformers.utils.auto_docstring"
    ).PLACEHOLDER_TO_AUTO_MODULE
    original = placeholders["model_class"]
    placeholders["model_class"] = placeholders["config_class"]
    try:
        yield
    finally:
        placeholders["model_class"] = original
