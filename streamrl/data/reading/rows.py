"""Rows of a data file in the schemas of verl, TRL and OpenRLHF, or plain text.

Known columns: the prompt (chat messages, or text as one user message), `data_source`,
`environment` (its name, if the run has several), `reward_model.ground_truth` (or top-level
`ground_truth`, or the column of `label_key`), `tools` and `chat_template_kwargs` (arguments of the
chat template), `extra_info`. Objects and messages may be JSON text, as in CSV files. All further
columns go into extra_info under their names, where rewards find them; so do the columns of
`label_key` and of the template. The row's own extra_info wins.

A parquet struct stores every key of its file in every row, as null if the row lacks the key. Nulls
are removed in all formats, so a row reads the same from each.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.bounded_read import check_depth, parse_json

JSON_COLUMNS = ("reward_model", "extra_info", "tools", "chat_template_kwargs")
"""Object columns that may be JSON text; a parquet column has a single type for all rows."""
_CHAT_PATTERN = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""Start of a list of chat messages, in JSON or as Python's repr."""


@dataclass(frozen=True)
class DataRow:
    """Row of a data file in the schema common to all formats.

    location: file and row, for errors. index: line or record number in the file, from 0.
    environment: name of the environment of the row's episodes; "" if the row names none.
    tools: JSON schemas of functions. template_arguments: extra arguments of the chat template.
    """

    location: str
    index: int
    messages: tuple[Mapping[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    is_chat: bool
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""


@dataclass(frozen=True)
class BadRow:
    """Row of a data file that cannot be used, with its index and the error."""

    index: int
    problem: ConfigError


def parse_records(
    records: Iterable[tuple[str, int, Any]], *, prompt_key: str, label_key: str
) -> Iterator[DataRow]:
    """Yield the rows of (location, index, record). Raises ConfigError at the first bad row."""
    for location, index, record in records:
        row = parse_record(record, location, index, prompt_key=prompt_key, label_key=label_key)
        if isinstance(row, BadRow):
            raise row.problem
        yield row


def parse_record(
    record: Any, location: str, index: int, *, prompt_key: str, label_key: str
) -> DataRow | BadRow:
    """Convert a record, or the ConfigError of an unreadable one, to a row or a bad row."""
    try:
        if isinstance(record, ConfigError):
            raise record
        check_depth(record)
        return _parse_row(record, location, index, prompt_key=prompt_key, label_key=label_key)
    except ConfigError as error:
        return BadRow(index, error)
    except ValueError as error:
        return BadRow(index, ConfigError(f"{location}: {error}"))


def _parse_row(
    record: Any, location: str, index: int, *, prompt_key: str, label_key: str
) -> DataRow:
    if not isinstance(record, dict):
        raise ConfigError(f"{location}: must be a JSON object, got {_describe_type(record)}")
    for setting, key in (("data.prompt_key", prompt_key), ("label_key", label_key)):
        if key and key not in record:
            columns = ", ".join(map(str, record)) or "none"
            raise ConfigError(
                f"{location}: no column {key!r} ({setting}); the columns are: {columns}"
            )
    fields = _remove_nulls(_parse_json_texts(record, location, prompt_key, label_key))
    prompt = fields.pop(prompt_key, None)
    data_source = _check_type(
        fields.pop("data_source", ""), str, name="data_source", location=location
    )
    ground_truth = fields.get(label_key) if label_key else _take_ground_truth(fields, location)
    environment = _check_type(
        fields.pop("environment", ""), str, name="environment", location=location
    )
    extra_info = _check_type(
        fields.pop("extra_info", {}), dict, name="extra_info", location=location
    )
    return DataRow(
        location=location,
        index=index,
        messages=_normalize_messages(prompt, name=prompt_key, location=location),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=fields | extra_info,
        is_chat=not isinstance(prompt, str),
        tools=_check_tools(fields.get("tools", []), location),
        template_arguments=_check_type(
            fields.get("chat_template_kwargs", {}),
            dict,
            name="chat_template_kwargs",
            location=location,
        ),
        environment=environment,
    )


def _parse_json_texts(
    record: Mapping[str, Any], location: str, prompt_key: str, label_key: str
) -> dict[str, Any]:
    parsed = dict(record)
    for name in JSON_COLUMNS:
        if isinstance(text := parsed.get(name), str) and name not in (prompt_key, label_key):
            try:
                parsed[name] = parse_json(text) if text.strip() else None
            except ValueError as error:
                raise ConfigError(
                    f"{location}: {name} is text, which must be JSON: {error}"
                ) from None
    if isinstance(text := parsed.get(prompt_key), str):
        parsed[prompt_key] = _parse_messages(text, prompt_key, location)
    return parsed


def _parse_messages(text: str, name: str, location: str) -> Any:
    """Parse chat messages as JSON text; return other text unchanged."""
    try:
        messages = parse_json(text) if text.lstrip().startswith("[") else None
    except ValueError as error:
        if _CHAT_PATTERN.match(text):
            raise ConfigError(
                f"{location}: {name} looks like chat messages, which must be JSON: {error}"
            ) from None
        return text
    is_chat = isinstance(messages, list) and any(
        isinstance(m, dict) and "role" in m for m in messages
    )
    return messages if is_chat else text


def _check_tools(tools: Any, location: str) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{location}: tools must be a list of objects, got {_describe_type(tools)}"
        )
    return tools


def _take_ground_truth(fields: dict[str, Any], location: str) -> Any:
    rule = _check_type(fields.pop("reward_model", {}), dict, name="reward_model", location=location)
    if "ground_truth" in rule and "ground_truth" in fields:
        raise ConfigError(
            f"{location}: ground_truth occurs at the top level and in reward_model; keep one"
        )
    return fields.pop("ground_truth", rule.get("ground_truth"))


def _normalize_messages(prompt: Any, *, name: str, location: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{location}: {name} must be text or a list of chat messages,"
            f" got {_describe_type(prompt)}"
        )
    return tuple(
        _normalize_message(message, where=f"message {number} of {name}", location=location)
        for number, message in enumerate(prompt, 1)
    )


def _normalize_message(message: Any, *, where: str, location: str) -> Mapping[str, Any]:
    """Check a chat message, and join its content parts into one text."""
    _check_type(message, dict, name=where, location=location)
    # An assistant message with tool calls may omit its content.
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        content = "".join(_get_part_text(part, where=where, location=location) for part in content)
    for key, value in (("role", message.get("role")), ("content", content)):
        text = _check_type(value, str, name=f"{key} of {where}", location=location)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{location}: {key} of {where} is not valid Unicode") from error
    return {**message, "content": content}


def _get_part_text(part: Any, *, where: str, location: str) -> str:
    """Return the text of a content part; images and other types raise ConfigError."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else _describe_type(part)
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ConfigError(
            f"{location}: content of {where} has a part of type {kind}; only text is supported"
        )
    return str(part["text"])


def _check_type(value: Any, expected: type, *, name: str, location: str) -> Any:
    if not isinstance(value, expected):
        word = "text" if expected is str else "an object"
        raise ConfigError(f"{location}: {name} must be {word}, got {_describe_type(value)}")
    return value


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_remove_nulls(item) for item in value]
    return value


def _describe_type(value: Any) -> str:
    if value is None:
        return "null or missing"
    return "an empty list" if value == [] else type(value).__name__
