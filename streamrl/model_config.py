"""What a model directory says of its model: config.json, and the headers of its weights."""

import importlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError
from streamrl.small_file import MIB, file_errors, read_small, read_small_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


TRUST_VARIABLE = "STREAMRL_TRUSTED_MODELS"
"""Names the model directories whose own code may be run, for all processes of a run."""
GENERATION_CONFIG = "generation_config.json"
MOST_DESCRIPTION_BYTES = 512 * MIB
"""Of a file that says what a model is; the largest are tokenizers."""
DESCRIPTION = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
MOST_LAYERS = 10_000
MOST_INDEX_BYTES = 256 << 20
NOT_SCALED = ("default", "llama3", "longrope", "su", "dynamic")
"""Kinds of rotary positions whose scaling max_position_embeddings includes, or that scale by the
length at hand in transformers, and by the longest there may be in vLLM."""


def _config_errors() -> tuple[type[Exception], ...]:
    """Return what transformers may raise of a config.json that is wrong."""
    from huggingface_hub.errors import StrictDataclassError

    wrong = (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)
    return (*wrong, StrictDataclassError)


def trusted_env(*paths: str) -> dict[str, str]:
    """Return what lets a process run the code that these model directories bring, if any."""
    trusted = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    return {TRUST_VARIABLE: trusted} if trusted else {}


def is_trusted(path: str) -> bool:
    """Whether code that a model directory brings (`auto_map`) may be run in this process."""
    trusted = os.environ.get(TRUST_VARIABLE, "").split(os.pathsep)
    return str(Path(path).absolute()) in trusted


def read_model_config(path: str, **changes: Any) -> "PreTrainedConfig":
    """Read the config of the model in a directory, with some of its settings changed.

    Raises ConfigError if that takes code of the directory's own and it is not trusted, and what
    transformers raises of a wrong config.
    """
    from transformers import AutoConfig

    if Path(path).is_dir():
        check_regular(Path(path))
    num_layers = _num_layers(Path(path))
    if num_layers > MOST_LAYERS:
        raise ConfigError(f"{path}: config.json says {num_layers} layers: at most {MOST_LAYERS}")
    try:
        with _without_model_classes():
            return AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=is_trusted(path), **changes
            )
    except ValueError as error:
        raise untrusted(path, error) or error from None


def check_regular(path: Path) -> None:
    """Raise ConfigError for what libraries would read for ever in a model's directory."""
    with file_errors(path):
        files = sorted(path.iterdir())
    for file in files:
        try:
            found = file.stat()
        except OSError:
            continue  # a link to nowhere, of which the one that reads it tells
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{file}: not a regular file")
        if file.suffix in DESCRIPTION and found.st_size > MOST_DESCRIPTION_BYTES:
            most = MOST_DESCRIPTION_BYTES // MIB
            raise ConfigError(f"{file}: more than {most} MiB: must be at most that")


def untrusted(path: str, error: Exception) -> ConfigError | None:
    """Say in one line that a directory brings code that is not run, if that is the error."""
    if "trust_remote_code" not in str(error):
        return None
    return ConfigError(
        f"{path}: brings code of its own (auto_map), which is not run;"
        " model.trust_remote_code=true runs that of model.path and critic.path"
    )


def model_length(path: str, *, limit: int | None) -> int:
    """Tokens a model takes, or `limit` if that is less. Raises ConfigError for what is no model."""
    stored = stored_shapes(Path(path), "model.path")
    _check_layers(Path(path), stored, "model.path")
    try:
        tokens = max_positions(read_model_config(path))
    except ConfigError as error:
        raise ConfigError(f"model.path={error}") from None
    except _config_errors() as error:
        raise ConfigError(f"model.path={path}: {' '.join(str(error).split())}") from None
    _check_shapes(Path(path), stored, "model.path")
    _check_generation_config(Path(path))
    if limit is not None and limit > tokens:
        raise ConfigError(f"model.max_length={limit}: the model takes at most {tokens} tokens")
    return tokens if limit is None else limit


def _check_generation_config(path: Path) -> None:
    """Raise ConfigError for defaults of generation that vLLM refuses, or leaves out unsaid.

    Temperatures beside greedy decoding, of which transformers warns, mean nothing to a run.
    """
    if not (path / GENERATION_CONFIG).is_file():
        return
    from transformers import GenerationConfig
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except _config_errors() as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.path={path}: {GENERATION_CONFIG}: {reason}") from None
    finally:
        logging.set_verbosity(verbosity)
    ends = found if isinstance(found, list) else [found]
    if not all(end is None or (isinstance(end, int) and end >= 0) for end in ends):
        raise ConfigError(
            f"model.path={path}: {GENERATION_CONFIG}: eos_token_id={found!r}: must be token ids"
        )


def max_positions(config: "PreTrainedConfig") -> int:
    """Return the most tokens a model takes, the scaling of its rotary positions included."""
    settings = config.get_text_config()
    tokens = int(settings.max_position_embeddings)
    scaled = [
        int(float(rope["factor"]) * _original_positions(rope, tokens))
        for rope in _rope_parameters(settings)
        if rope.get("rope_type") not in NOT_SCALED and rope.get("factor")
    ]
    # The positions of Gemma-3 are given scaled, whatever their kind.
    return tokens if "gemma3" in settings.model_type else max([tokens, *scaled])


def _rope_parameters(settings: Any) -> list[Mapping[str, Any]]:
    """Return the rotary parameters of all kinds of layers."""
    found = settings.to_dict().get("rope_parameters") or {}
    return [found] if "rope_type" in found else [one for one in found.values() if one]


def _original_positions(rope: Mapping[str, Any], tokens: int) -> int:
    """Return the positions before scaling: YaRN names them, other kinds scale all there are."""
    return int(rope.get("original_max_position_embeddings") or tokens)


def check_weights(path: Path, key: str) -> None:
    """Raise ConfigError unless a directory holds tensors of the shapes that its config says.

    Of families that are not known here, only the embedding and the number of layers are compared:
    see `support.check_against_class`.
    """
    stored = stored_shapes(path, key)
    _check_layers(path, stored, key)
    _check_shapes(path, stored, key)


def _check_shapes(path: Path, stored: Mapping[str, tuple[int, ...]], key: str) -> None:
    """Raise ConfigError for the first tensor of another shape than the config says."""
    try:
        config = read_model_config(str(path)).get_text_config()
        expected = _expected_shapes(config)
    # What is wrong with the config itself is told by those who need more of it.
    except _config_errors():
        return
    for name, shape in stored.items():
        wanted = expected.get(LAYER_NUMBER.sub(".#.", name).removeprefix("model."))
        if wanted is not None and shape != wanted:
            raise ConfigError(
                f"{key}={path}: {name} has shape {shape} in its files, {wanted} by config.json"
            )


def _check_layers(path: Path, stored: Iterable[str], key: str) -> None:
    """Raise ConfigError for more layers than the files hold."""
    num_layers = _num_layers(path)
    numbers = [int(found[1]) for name in stored if (found := LAYER_NUMBER.search(name))]
    if numbers and num_layers > max(numbers) + 1:
        raise ConfigError(
            f"{key}={path}: its files hold {max(numbers) + 1} layers, config.json says {num_layers}"
        )


def _num_layers(path: Path) -> int:
    """Read how many layers a config.json says, before transformers lists each; 0 if it does not."""
    try:
        config = json.loads(read_small(path / "config.json"))
        settings = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, RecursionError, TypeError, AttributeError):
        return 0
    counts = [settings.get(name) for name in ("num_hidden_layers", "num_layers", "n_layer")]
    return max((count for count in counts if isinstance(count, int)), default=0)


LAYER_NUMBER = re.compile(r"\.(\d+)\.")
"""The number of a layer in the name of a parameter."""
LLAMA_LIKE = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""Families whose layers are called, and sized, as Llama's are."""


def is_like_llama(family: str) -> bool:
    """Whether `check_weights` knows the shapes of all large tensors of a family."""
    return family in LLAMA_LIKE


def weight_files(path: Path) -> list[Path]:
    """Name the files that a directory's weights are in: those of its index, if it has one.

    Others may hold the same weights once more, as the consolidated file of Mistral's does.
    """
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return files
    try:
        named = set(read_small_json(index, most_bytes=MOST_INDEX_BYTES)["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return files
    return [file for file in files if file.name in named]


def stored_shapes(path: Path, key: str) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors in a directory from the headers of its safetensors files.

    Raises ConfigError, beginning with `key`, if there are none or a header cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_dir():
        raise ConfigError(f"{key}={path}: no such directory")
    check_regular(path)
    files = weight_files(path)
    if not files:
        raise ConfigError(f"{key}={path}: holds no .safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{key}={path}: {file.name}: {error}") from None
    return shapes


def _expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a config says, by names without `model.` and with # for a layer."""
    hidden, vocab = int(config.hidden_size), int(config.vocab_size)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("embed_tokens.weight", "lm_head.weight", "gpt_neox.embed_in.weight", "embed_out.weight"),
        (vocab, hidden),
    )
    if config.model_type not in LLAMA_LIKE:
        return shapes
    heads, inner = int(config.num_attention_heads), int(config.intermediate_size)
    kv_heads = int(vars(config).get("num_key_value_heads") or heads)
    size = int(vars(config).get("head_dim") or hidden // heads)
    layer = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv_heads * size, hidden),
        "self_attn.v_proj": (kv_heads * size, hidden),
        "self_attn.qkv_proj": ((heads + 2 * kv_heads) * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.gate_up_proj": (2 * inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes |= {f"layers.#.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "norm.weight": (hidden,)}


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
