"""Completions that are there already: read from a file and put together with their rows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.data import DataFile, DataRow, load_rows
from streamrl.data.reading.formats import JsonLines, parse_text_row
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import open_regular_file
from streamrl.messages import Prompt, make_uid


@dataclass(frozen=True)
class CompletionGroup:
    """The completions of one row, and the place of each among the lines of its file."""

    prompt: Prompt
    line_indices: Sequence[int]
    completions: Sequence[str]


def read_completion_groups(file: DataFile, completions: str) -> list[CompletionGroup]:
    """The completions of a file by their row, in the order of its first line for each.

    Raises ConfigError naming file, line and rule.
    """
    read = list(_read_completions(completions))
    rows = load_rows(file.path, file.prompt_key, label_key=file.label_key, split=file.split)
    prompts = _make_prompts(rows, {index for _, index, _ in read})
    places: dict[int, list[int]] = {}
    for place, (where, index, _) in enumerate(read):
        if index not in prompts:
            raise ConfigError(
                f"{where}: index={index}: {file.path} has no such row, counted from 0"
            )
        places.setdefault(index, []).append(place)
    return [
        CompletionGroup(prompts[index], own, [read[place][2] for place in own])
        for index, own in places.items()
    ]


def _make_prompts(rows: Iterator[DataRow], wanted: set[int]) -> Mapping[int, Prompt]:
    """The rows that are wanted, by index. No reward reads the tokens of a prompt."""
    no_tokens = np.zeros(1, np.int32)
    return {
        row.index: Prompt(
            uid=make_uid(0, row.index),
            token_ids=no_tokens,
            messages=row.messages,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            row_location=row.place,
            is_chat=row.is_chat,
        )
        for row in rows
        if row.index in wanted
    }


def _read_completions(path: str) -> Iterator[tuple[str, int, str]]:
    """Of each line its place in words, the index of its row, and the completion."""
    is_empty = True
    try:
        with open_regular_file(path) as file:
            for index, _, line in JsonLines().iter_rows(file):
                is_empty, where = False, f"{path} line {index + 1}"
                record = parse_text_row(JsonLines(), line, where)
                if isinstance(record, ConfigError):
                    raise record
                yield (where, *_parse_completion(record, where))
    except OSError as error:
        raise ConfigError(f"--completions {path}: cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--completions {path}: {error}") from None
    if is_empty:
        raise ConfigError(f"--completions {path}: holds no completions")


def _describe_type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _parse_completion(record: Any, where: str) -> tuple[int, str]:
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be a JSON object, is {_describe_type(record)}")
    for key, kind, what in (
        ("index", int, "the number of a row, from 0"),
        ("completion", str, "text"),
    ):
        if key not in record:
            raise ConfigError(f"{where}: no key {key!r}; the keys are: {', '.join(record) or '-'}")
        if not isinstance(record[key], kind) or isinstance(record[key], bool):
            raise ConfigError(f"{where}: {key}={json.dumps(record[key])}: must be {what}")
    return record["index"], record["completion"]
