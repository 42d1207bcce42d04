"""Entries of `data.train` and `data.eval`: files, or tasks of a package, and reading options."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.data.reading.reasoning_gym_table import REASONING_GYM, ReasoningGymTasks
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import read_settings, suggest_nearest
from streamrl.user_code.python_module import split_reference

MODEL_TEMPLATE, PLAIN_TEMPLATE = "model", "plain"
"""Template names that are not files: the model's chat template, and joining by newlines."""


FILE_KIND = "file"
DATA_KINDS = (FILE_KIND, REASONING_GYM)


@dataclass(frozen=True)
class DataFile:
    """One prompt file with its reading options.

    kind: file, or reasoning_gym: tasks that this package makes, in place of a file.
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
    tasks: tasks of kind reasoning_gym; the path is then their name in messages.
    """

    path: str
    weight: float | None = None
    split: str = ""
    prompt_key: str = ""
    label_key: str = ""
    template: str = MODEL_TEMPLATE
    filter: str = ""
    name: str = ""
    kind: str = FILE_KIND
    key: str = "data"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    tasks: ReasoningGymTasks | None = None


FILE_KEYS = tuple(
    setting.name
    for setting in dataclasses.fields(DataFile)
    if setting.name not in ("key", "template_arguments", "tasks")
)
"""Keys that a user may set for a file."""
TASK_KEYS = tuple(setting.name for setting in dataclasses.fields(ReasoningGymTasks))
COMMON_KEYS = ("kind", "weight", "template", "filter", "name")
"""Keys that a user may also set for tasks."""


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


def check_separate_tasks(train: Sequence[DataFile], evaluation: Sequence[DataFile]) -> None:
    """Raise ConfigError if tasks of an evaluation are among those of training.

    Seed and index determine a task through their sum, so seeds that only differ are not enough.
    """
    for file, other in itertools.product(evaluation, train):
        if file.tasks is None or other.tasks is None:
            continue
        pairs = itertools.product(file.tasks.seed_ranges, other.tasks.seed_ranges)
        for (name, seeds), (other_name, other_seeds) in pairs:
            overlap = range(max(seeds[0], other_seeds[0]), min(seeds[-1], other_seeds[-1]) + 1)
            if name == other_name and overlap:
                raise ConfigError(
                    f"{file.key}.seed={file.tasks.seed}: {len(overlap)} tasks of {name} are also in"
                    f" {other.key}, as task i is made from seed + i; seeds must be as far apart as"
                    " the size"
                )


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
    kind = entry.get("kind") or FILE_KIND
    if kind not in DATA_KINDS:
        raise ConfigError(f"{key}.kind={kind}: must be one of {', '.join(DATA_KINDS)}")
    if kind == REASONING_GYM:
        return _parse_tasks(entry, key)
    for name, value in entry.items():
        _check_entry(f"{key}.{name}", str(name), value)
    if not entry.get("path"):
        raise ConfigError(f"{key}.path: missing; it names a file of prompts")
    file = DataFile(**{name: value for name, value in entry.items() if value is not None})
    stem = Path(file.path).stem + (f"_{file.split}" if file.split else "")
    return dataclasses.replace(
        file, prompt_key=file.prompt_key or prompt_key, name=file.name or stem, key=key
    )


def _parse_tasks(entry: Mapping[str, Any], key: str) -> DataFile:
    own = {name: value for name, value in entry.items() if name in TASK_KEYS}
    common = {name: value for name, value in entry.items() if name not in TASK_KEYS}
    for name, value in common.items():
        _check_entry(f"{key}.{name}", str(name), value, keys=(*COMMON_KEYS, *TASK_KEYS))
    tasks = read_settings(ReasoningGymTasks, own, section=key)
    settings = {name: value for name, value in common.items() if value is not None}
    file = DataFile(f"{REASONING_GYM}:{tasks.dataset}", **settings, tasks=tasks, key=key)
    return dataclasses.replace(file, prompt_key="prompt", name=file.name or tasks.dataset)


def _check_entry(key: str, name: str, value: Any, keys: Sequence[str] = FILE_KEYS) -> None:
    if name not in keys:
        raise ConfigError(f"{key}={value!r}: unknown; {suggest_nearest(name, keys)}")
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
