"""Rows of a data file as users have them: verl's columns in parquet or JSONL, or just text.

Read columns: the prompt (chat messages, or text, which is one user message), `data_source`,
`reward_model.ground_truth` (or `ground_truth` at the top), `extra_info`. Any other column is kept
in extra_info under its name, where a reward finds it; a key that extra_info has itself wins.

A parquet struct has every key of its file in every row, null where the row had none. Nulls are
removed from objects in both formats, so that the same row reads the same from either.
"""

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError

#: Key under which extra_info keeps a prompt that was text, not chat messages.
TEXT_PROMPT = "prompt_text"


@dataclass(frozen=True)
class Row:
    """One row: `place` names it in errors; `index` counts the file's lines or records from 0."""

    place: str
    index: int
    messages: tuple[Mapping[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


def load_rows(path: str, prompt_key: str = "prompt") -> Iterator[Row]:
    """The rows of a .parquet or .jsonl file, one at a time, in file order.

    Raises ConfigError naming file, row and rule: at the first row that cannot be used, if the file
    cannot be read, and at the end if it held no row.
    """
    empty = True
    for place, index, record in read_records(path):
        empty = False
        yield _parse(record, place=place, index=index, prompt_key=prompt_key)
    if empty:
        raise ConfigError(f"{path}: holds no rows")


_Records = Iterator[tuple[str, int, Any]]


def read_records(path: str) -> _Records:
    """What a .parquet or .jsonl file holds, as (place, index, record), one at a time.

    Raises ConfigError naming the file if it cannot be read.
    """
    reader = _READERS.get(Path(path).suffix)
    if reader is None:
        raise ConfigError(f"{path}: unknown extension, must be one of {', '.join(_READERS)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or _one_line(error)}"
        ) from error


def _read_jsonl(path: str) -> _Records:
    with open(path, "rb") as file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            place = f"{path} line {index + 1}"
            text = line.removeprefix(codecs.BOM_UTF8) if index == 0 else line
            try:
                record = json.loads(text.decode())
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: not JSON: {_one_line(error)}") from error
            yield place, index, record


def _read_parquet(path: str) -> _Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist(maps_as_pydicts="strict"):
                    yield f"{path} row {index + 1}", index, record
                    index += 1
    except (pa.ArrowException, ValueError, KeyError) as error:
        where = f"after row {index}" if index else "as parquet"
        raise ConfigError(f"{path}: cannot be read {where}: {_one_line(error)}") from error


_READERS: Mapping[str, Callable[[str], _Records]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
}


def _parse(record: Any, *, place: str, index: int, prompt_key: str) -> Row:
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: must be a JSON object, is a {_type_name(record)}")
    if prompt_key not in record:
        columns = ", ".join(map(str, record)) or "none"
        raise ConfigError(
            f"{place}: no column {prompt_key!r} (data.prompt_key); the columns are: {columns}"
        )
    fields = _without_nulls(record)
    prompt = fields.pop(prompt_key, None)
    data_source = _typed(fields.pop("data_source", ""), str, name="data_source", place=place)
    ground_truth = _take_ground_truth(fields, place)
    extra_info = _typed(fields.pop("extra_info", {}), dict, name="extra_info", place=place)
    if isinstance(prompt, str):
        fields[TEXT_PROMPT] = prompt
    return Row(
        place=place,
        index=index,
        messages=_messages(prompt, name=prompt_key, place=place),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=fields | extra_info,
    )


def _take_ground_truth(fields: dict[str, Any], place: str) -> Any:
    rule = _typed(fields.pop("reward_model", {}), dict, name="reward_model", place=place)
    if "ground_truth" in rule and "ground_truth" in fields:
        raise ConfigError(
            f"{place}: ground_truth stands at the top and in reward_model: give it once"
        )
    return fields.pop("ground_truth", rule.get("ground_truth"))


def _messages(prompt: Any, *, name: str, place: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{place}: {name} must be text or a list of chat messages, is {_type_name(prompt)}"
        )
    for number, message in enumerate(prompt, 1):
        where = f"message {number} of {name}"
        _typed(message, dict, name=where, place=place)
        for key in ("role", "content"):
            text = _typed(message.get(key), str, name=f"{key} of {where}", place=place)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{place}: {key} of {where} is not valid Unicode") from error
    return tuple(prompt)


def _typed(value: Any, wanted: type, *, name: str, place: str) -> Any:
    if not isinstance(value, wanted):
        word = "text" if wanted is str else "an object"
        raise ConfigError(f"{place}: {name} must be {word}, is {_type_name(value)}")
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _type_name(value: Any) -> str:
    if value is None:
        return "null or missing"
    return "an empty list" if value == [] else type(value).__name__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
