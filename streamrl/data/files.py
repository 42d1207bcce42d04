"""Data file entries of `data.train` and `data.eval`: path, weight and reading options."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.python_module import split_reference
from streamrl.files.typed_settings import suggest_nearest

MODEL_TEMPLATE, PLAIN_TEMPLATE = "model", "plain"
"""Template names that are not files: the model's chat template, and joining by newlines."""


@dataclass(frozen=True)
class DataFile:
    """One prompt file with its reading options.

    path: .jsonl or .parquet file, directory of parquet shards, or Hugging Face dataset on disk.
    weight: weight in the stream, relative to the other files; null: proportional to its rows.
    split: split to read from a dataset or shard directory with several.
    prompt_key: column with the prompt; empty: data.prompt_key.
    label_key: column with the ground truth; empty: ground_truth, or reward_model.ground_truth.
    template: conversion of chat messages to text: model (the model's template), plain (contents
        joined by newlines), or the path of a jinja file.
    filter: file.py:function, called with each prompt; returns whether to keep it.
    name: name of the file in evaluation results; empty: the file name without extension.

    key: setting that names the file, for errors, e.g. data.train[0].
    template_arguments: data.chat_template_kwargs.
    """

    path: str
    weight: float | None = None
    split: str = ""
    prompt_key: str = ""
    label_key: str = ""
    template: str = MODEL_TEMPLATE
    filter: str = ""
    name: str = ""
    key: str = "data"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


FILE_KEYS = tuple(
    setting.name
    for setting in dataclasses.fields(DataFile)
    if setting.name not in ("key", "template_arguments")
)
"""Keys that a user may set."""


def parse_data_files(value: Any, *, key: str, prompt_key: str) -> tuple[DataFile, ...]:
    """Parse the value of data.train or data.eval to data files.

    value: a path, a mapping of DataFile's keys, or a list of these. key: config key of the value.
    prompt_key: default column of the prompt. Raises a one-line ConfigError with key, value and
    rule, or with the nearest valid key.
    """
    if not value:
        return ()
    if not isinstance(value, list | tuple):
        return (_parse_data_file(value, key, prompt_key),)
    return tuple(
        _parse_data_file(entry, f"{key}[{i}]", prompt_key) for i, entry in enumerate(value)
    )


def check_stream_weights(files: Sequence[DataFile], *, key: str) -> None:
    has_weight = [file.weight is not None for file in files]
    if any(has_weight) and not all(has_weight):
        i = has_weight.index(False)
        raise ConfigError(f"{key}[{i}].weight: missing; give all files a weight, or none")


def check_eval_files(files: Sequence[DataFile], *, key: str) -> None:
    names: list[str] = []
    for i, file in enumerate(files):
        if file.weight is not None:
            raise ConfigError(
                f"{key}[{i}].weight={file.weight}: evaluation uses every row; remove the weight"
            )
        if file.name in names:
            other = names.index(file.name)
            raise ConfigError(
                f"{key}[{i}].name={file.name}: already the name of {key}[{other}]; choose another"
            )
        names.append(file.name)


def make_paths_absolute(value: Any) -> Any:
    if isinstance(value, str) and value:
        return str(Path(value).absolute())
    if isinstance(value, dict):
        return {name: _make_entry_absolute(name, entry) for name, entry in value.items()}
    return [make_paths_absolute(entry) for entry in value] if isinstance(value, list) else value


def _make_entry_absolute(name: str, value: Any) -> Any:
    if name == "path" or (name == "template" and value not in (MODEL_TEMPLATE, PLAIN_TEMPLATE)):
        return make_paths_absolute(value)
    if name == "filter" and isinstance(value, str):
        path, colon, function = value.rpartition(":")
        # Validated later by _check_entry, which knows the config key.
        return f"{make_paths_absolute(path)}:{function}" if colon else value
    return value


def _parse_data_file(entry: Any, key: str, prompt_key: str) -> DataFile:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{key}={entry!r}: must be a path, a mapping of {', '.join(FILE_KEYS)}, or a"
            f" list of these"
        )
    for name, value in entry.items():
        _check_entry(f"{key}.{name}", str(name), value)
    if not entry.get("path"):
        raise ConfigError(f"{key}.path: missing; it names a file of prompts")
    file = DataFile(**{name: value for name, value in entry.items() if value is not None})
    stem = Path(file.path).stem + (f"_{file.split}" if file.split else "")
    return dataclasses.replace(
        file, prompt_key=file.prompt_key or prompt_key, name=file.name or stem, key=key
    )


def _check_entry(key: str, name: str, value: Any) -> None:
    if name not in FILE_KEYS:
        raise ConfigError(f"{key}={value!r}: unknown; {suggest_nearest(name, FILE_KEYS)}")
    if value is None:
        return
    if name == "weight":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{key}={value!r}: must be a number above 0")
    elif not isinstance(value, str):
        raise ConfigError(f"{key}={value!r}: must be text")
    elif name == "name" and ("/" in value or not value.isprintable()):
        raise ConfigError(f"{key}={value!r}: must be printable, without a slash")
    elif name == "filter" and value:
        split_reference(value, setting=key)
