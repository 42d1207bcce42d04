"""Rows of a data file as users have them: verl's columns, TRL's, OpenRLHF's, or just text.

Read columns: the prompt (chat messages, or text, which is one user message), `data_source`,
`reward_model.ground_truth` (or `ground_truth` at the top, or the column that `label_key` names),
`extra_info`. Any other column, that of `label_key` included, is kept in extra_info under its name,
where a reward finds it; a key that extra_info has itself wins.

A parquet struct has every key of its file in every row, null where the row had none. Nulls are
removed from objects in all formats, so that the same row reads the same from each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.data.formats import read_records
from streamrl.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One row: `place` names it in errors; `index` counts the file's lines or records from 0."""

    place: str
    index: int
    messages: tuple[Mapping[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    is_chat: bool


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    index: int
    problem: ConfigError


def load_rows(
    path: str, prompt_key: str = "prompt", *, label_key: str = "", split: str = ""
) -> Iterator[Row]:
    """The rows of a data file, one at a time, in file order.

    Raises ConfigError naming file, row and rule: at the first row that cannot be used, if the file
    cannot be read, and at the end if it held no row.
    """
    for row in scan_rows(path, prompt_key, label_key=label_key, split=split):
        if isinstance(row, BadRow):
            raise row.problem
        yield row


def scan_rows(
    path: str, prompt_key: str = "prompt", *, label_key: str = "", split: str = ""
) -> Iterator[Row | BadRow]:
    """The rows of a data file, and those that cannot be used.

    Raises ConfigError if the file cannot be read, and at the end if it held no row.
    """
    empty = True
    for place, index, record in read_records(path, split):
        empty = False
        try:
            if isinstance(record, ConfigError):
                raise record
            yield _parse(record, place, index, prompt_key=prompt_key, label_key=label_key)
        except ConfigError as error:
            yield BadRow(index, error)
    if empty:
        raise ConfigError(f"{path}: holds no rows")


def _parse(record: Any, place: str, index: int, *, prompt_key: str, label_key: str) -> Row:
    if not isinstance(record, dict):
        raise ConfigError(f"{place}: must be a JSON object, is {_type_name(record)}")
    for setting, key in (("data.prompt_key", prompt_key), ("label_key", label_key)):
        if key and key not in record:
            columns = ", ".join(map(str, record)) or "none"
            raise ConfigError(f"{place}: no column {key!r} ({setting}); the columns are: {columns}")
    fields = _without_nulls(record)
    prompt = fields.pop(prompt_key, None)
    data_source = _typed(fields.pop("data_source", ""), str, name="data_source", place=place)
    ground_truth = fields.get(label_key) if label_key else _take_ground_truth(fields, place)
    extra_info = _typed(fields.pop("extra_info", {}), dict, name="extra_info", place=place)
    return Row(
        place=place,
        index=index,
        messages=_messages(prompt, name=prompt_key, place=place),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=fields | extra_info,
        is_chat=not isinstance(prompt, str),
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
