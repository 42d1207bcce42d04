"""Config section `data`: prompt files, reading options, limits of prompts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from streamrl.data.replays import ReplayConfig
from streamrl.data.rows import RowKeys
from streamrl.errors import ConfigError
from streamrl.files.python_module import split_reference
from streamrl.files.typed_settings import (
    FIXED_ON_RESUME,
    above,
    at_least,
    one_of,
    quote_value,
    read_settings,
)
from streamrl.messages import ROLLOUTS

MODEL_TEMPLATE, PLAIN_TEMPLATE = "model", "plain"
"""Template names that are not files: the model's chat template, and joining by newlines."""


@dataclass(frozen=True)
class FileSettings:
    """Entry of `data.train` or `data.eval`: a prompt file with its reading options.

    path: .jsonl or .parquet file, or directory of parquet shards; for training on completions also
        a run directory, for its recorded rollouts that ended.
    weight: weight in the stream, relative to the other files; null: proportional to its rows.
    split: split to read from a shard directory with several.
    prompt_key: column with the prompt, chat messages or text.
    label_key: column with the ground truth; empty: ground_truth, or reward_model.ground_truth.
    template: conversion of chat messages to text: model (the model's template), plain (contents
        joined by newlines), or the path of a jinja file.
    filter: file.py:function, called with each prompt; returns whether to keep it.
    targets: messages of the assistant that sft learns from a conversation: all, or the last.
    min_score: least value in the column `score` of a row that is kept; null: any.
    name: name of the file in evaluation results; empty: the file name without extension.
    """

    path: str = ""
    weight: Annotated[float | None, above(0)] = None
    split: str = ""
    prompt_key: str = "prompt"
    label_key: str = ""
    template: str = MODEL_TEMPLATE
    filter: str = ""
    targets: Annotated[str, one_of("all", "last")] = "all"
    min_score: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("path: missing; it names a file of prompts")
        if "/" in self.name or not self.name.isprintable():
            raise ConfigError(f"name={self.name!r}: must be printable, without a slash")
        if self.filter:
            split_reference(self.filter, setting="filter")


@dataclass(frozen=True)
class DataFile(FileSettings):
    """Prompt file of a run.

    key: setting that names the file, for errors, e.g. data.train[0].
    template_arguments: data.chat_template_kwargs.
    gives: what rows must have, as in `RowKeys`.
    """

    key: str = "data"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    gives: str = ROLLOUTS

    @property
    def row_keys(self) -> RowKeys:
        return RowKeys(self.prompt_key, self.label_key, self.gives, self.targets == "last")


FILE_KEYS = tuple(setting.name for setting in dataclasses.fields(FileSettings))
"""Keys that a user may set for a file."""


@dataclass
class DataConfig:
    """Prompt files, and the treatment of prompts that are too long.

    train: training prompts: a file, a mapping (path, weight, split, prompt_key,
        label_key, template, filter, name), or a list of files and mappings.
    eval: evaluation prompts in the same form, without weights; may be empty.
    pretrain: file of texts (column `text`) for algorithm.ptx_coef; may be empty.
    shuffle: train in a new order every epoch (true), or in file order (false).
    curriculum: column with a number, such as a difficulty, by which each epoch goes from low to
        high, ties in the order of shuffle; empty: none.
    sampling: uniform: every row once per epoch; difficulty: a row with chance 4 p (1 - p) per
        epoch, for its running pass rate p, 1/2 at first; half of a result's weight is lost in 32
        versions.
    replay: replay of trained groups with right and wrong rollouts: frac of the admissions (0.25),
        from the latest size groups (64), tokens at most max_age versions old (16); empty: none.
    max_prompt_tokens: limit of a rendered prompt; null: all tokens that the completion leaves.
    on_long_prompt: action on a longer prompt: error, or skip the row.
    chat_template_kwargs: extra arguments of chat templates, e.g. enable_thinking: false; a column
        of the same name in a row wins.
    """

    train: Any = ""
    eval: Any = ""
    pretrain: str = ""
    shuffle: bool = True
    curriculum: Annotated[str, FIXED_ON_RESUME] = ""
    sampling: Annotated[str, one_of("uniform", "difficulty"), FIXED_ON_RESUME] = "uniform"
    replay: Annotated[dict[str, Any], FIXED_ON_RESUME] = field(default_factory=dict)
    max_prompt_tokens: Annotated[int | None, at_least(1)] = None
    on_long_prompt: Annotated[str, one_of("error", "skip")] = "error"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read_replay()
        train, named = self.train_files, dict[str, DataFile]()
        unweighted = [file for file in train if file.weight is None]
        if 0 < len(unweighted) < len(train):
            key = unweighted[0].key
            raise ConfigError(f"{key}.weight: missing; give all files a weight, or none")
        for file in self.eval_files:
            if file.weight is not None:
                key = f"{file.key}.weight={file.weight:g}"
                raise ConfigError(f"{key}: evaluation uses every row; remove the weight")
            if (other := named.setdefault(file.name, file)) is not file:
                key = f"{file.key}.name={file.name}"
                raise ConfigError(f"{key}: already the name of {other.key}; choose another")

    def read_replay(self) -> ReplayConfig | None:
        """Return the settings of the replay, None without. Raises ConfigError if invalid."""
        if not self.replay:
            return None
        return read_settings(ReplayConfig, self.replay, section="data.replay")

    @property
    def train_files(self) -> tuple[DataFile, ...]:
        return self.parse_files(self.train, key="data.train")

    @property
    def eval_files(self) -> tuple[DataFile, ...]:
        return self.parse_files(self.eval, key="data.eval")

    def check_shared_template(self) -> str:
        """Return the template of all files, without files the model's.

        Raises ConfigError if they differ.
        """
        files = (*self.train_files, *self.eval_files)
        for file in files:
            if file.template != files[0].template:
                raise ConfigError(
                    f"{file.key}.template={file.template}: differs from {files[0].key}.template="
                    f"{files[0].template}; with an environment all files need the same template"
                )
        return files[0].template if files else MODEL_TEMPLATE

    def parse_files(self, value: Any, *, key: str) -> tuple[DataFile, ...]:
        files = parse_data_files(value, key=key)
        return tuple(replace(file, template_arguments=self.chat_template_kwargs) for file in files)

    def compute_prompt_limit(
        self, *, model_tokens: int, max_new_tokens: int, key: str = "generator.max_new_tokens"
    ) -> int:
        """Return the maximum tokens of a prompt.

        model_tokens: context length of the model. max_new_tokens: longest completion, or episode
        without its prompt. key: setting that limits it, for errors. Raises ConfigError if the
        completion leaves no tokens for a prompt, or fewer than max_prompt_tokens.
        """
        available = model_tokens - max_new_tokens
        arithmetic = (
            f"the model's context is {model_tokens} tokens, completions take up to {max_new_tokens}"
        )
        if available < 1:
            raise ConfigError(
                f"{key}={max_new_tokens}: no tokens are left for a prompt: {arithmetic}"
            )
        if self.max_prompt_tokens is None:
            return available
        if self.max_prompt_tokens > available:
            raise ConfigError(
                f"data.max_prompt_tokens={self.max_prompt_tokens}: must be at most"
                f" {available}: {arithmetic}"
            )
        return self.max_prompt_tokens


def parse_data_files(value: Any, *, key: str) -> tuple[DataFile, ...]:
    """Parse the value of data.train or data.eval to data files.

    value: a path, a mapping of the keys of FileSettings, or a list of these. key: config key of the
    value. Raises a one-line ConfigError with key, value and rule, or with the nearest valid key.
    """
    if not value:
        return ()
    if not isinstance(value, list | tuple):
        return (_parse_data_file(value, key),)
    return tuple(_parse_data_file(entry, f"{key}[{i}]") for i, entry in enumerate(value))


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
        # Validated later, by FileSettings.
        return f"{make_paths_absolute(path)}:{function}" if colon else value
    return value


def _parse_data_file(entry: Any, key: str) -> DataFile:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{key}={quote_value(entry)}: must be a path, a mapping of {', '.join(FILE_KEYS)}, or a"
            f" list of these"
        )
    # Run directories of earlier versions name the kind.
    entry = dict(entry)
    if (kind := entry.pop("kind", "file")) != "file":
        raise ConfigError(
            f"{key}.kind={kind}: no longer a key, every entry is a file;"
            " examples/reasoning_gym writes the tasks of that package to one"
        )
    settings = read_settings(FileSettings, entry, section=key)
    stem = Path(settings.path).stem + (f"_{settings.split}" if settings.split else "")
    file = DataFile(**vars(settings), key=key)
    return replace(file, name=file.name or stem)
