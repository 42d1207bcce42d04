"""Rows of a data file in the schemas of verl, TRL and OpenRLHF, or plain text.

Known columns: the prompt (chat messages, or text as one user message), `data_source`,
`environment` (its name, if the run has several), `reward_model.ground_truth` (or top-level
`ground_truth`, or the column of `label_key`), `tools` and `chat_template_kwargs` (arguments of the
chat template), `extra_info`. Objects and messages may be JSON text. All further
columns go into extra_info under their names, where rewards find them; so do the columns of
`label_key` and of the template. The row's own extra_info wins.

Rows that give completions, to train on without a generator, have `completion`, or `chosen` and
`rejected`, text or messages, after the prompt; or conversations as `messages`, or as both of
`chosen` and `rejected`, whose common beginning is the prompt. Recorded rollouts of a run are such
rows.

A parquet struct stores every key of its file in every row, as null if the row lacks the key. Nulls
are removed in all formats, so a row reads the same from each.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError, DataError, get_message
from streamrl.files.bounded_read import check_depth, parse_json
from streamrl.messages import PAIRS, ROLLOUTS, TARGETS

JSON_COLUMNS = ("reward_model", "extra_info", "tools", "chat_template_kwargs")
"""Object columns that may be JSON text; a parquet column has a single type for all rows."""
COMPLETION_COLUMNS = {TARGETS: ("completion",), PAIRS: ("chosen", "rejected")}
Messages = tuple[Mapping[str, Any], ...]
Piece = tuple[str, bool, bool]
"""Text of a recorded episode, whether the policy wrote it, and whether it is a prompt."""
_CHAT_PATTERN = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""Start of a list of chat messages, in JSON or as Python's repr."""


IndexedRecords = list[tuple[str, int, Any]]
"""(location, index from 0, record) of rows; an unreadable record is its ConfigError."""


@contextmanager
def wrap_data_errors(path: str) -> Iterator[None]:
    """Convert any error of reading rows during a run to DataError with the path."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: can no longer be read: {get_message(error)}") from error


@dataclass(frozen=True)
class DataRow:
    """Row of a data file in the schema common to all formats.

    location: file and row, for errors. index: line or record number in the file, from 0.
    environment: name of the environment of the row's episodes; "" if the row names none.
    tools: JSON schemas of functions. template_arguments: extra arguments of the chat template.
    completions: messages that may follow the prompt, of one target or of a pair. pieces: a recorded
    episode, with its control tokens.
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
    completions: tuple[Messages, ...] = ()
    pieces: Sequence[Piece] = ()


@dataclass(frozen=True)
class RowKeys:
    """How to read the rows of a file: columns of prompt and ground truth, "" for the usual one.

    gives: ROLLOUTS, or the completions that a row must have. last_turn: of a conversation only the
    last message of the assistant is a target. is_recorded: rows are recorded rollouts of a run.
    """

    prompt_key: str
    label_key: str
    gives: str = ROLLOUTS
    last_turn: bool = False
    is_recorded: bool = False


def parse_record(record: Any, location: str, index: int, keys: RowKeys) -> DataRow | ConfigError:
    """Convert a record to a row; a row that cannot be read or used is its ConfigError."""
    if isinstance(record, ConfigError):
        return record
    try:
        check_depth(record)
        return _parse_row(record, location, index, keys)
    except ValueError as error:
        return ConfigError(f"{location}: {error}")


def _parse_row(record: Any, location: str, index: int, keys: RowKeys) -> DataRow:
    """Convert a record to a row. Raises ValueError for one that cannot be used."""
    prompt_key, label_key, gives = keys.prompt_key, keys.label_key, keys.gives
    _check_type(record, dict, "a JSON object", name="")
    for setting, key in (("prompt_key", prompt_key), ("label_key", label_key)):
        if key and key not in record and not (gives != ROLLOUTS and key == prompt_key):
            columns = ", ".join(map(str, record)) or "none"
            raise ValueError(f"no column {key!r} ({setting}); the columns are: {columns}")
    texts = {prompt_key, *(("messages", *COMPLETION_COLUMNS[gives]) if gives != ROLLOUTS else ())}
    fields = _remove_nulls(_parse_json_texts(record, texts, label_key))
    prompt, completions = fields.pop(prompt_key, None), tuple[Messages, ...]()
    turns = parse_json(fields.pop("turns")) if keys.is_recorded else ()
    pieces = [(t["text"], t["source"] == "sampled", t["source"] == "prompt") for t in turns]
    if gives != ROLLOUTS:
        prompt, completions = _take_completions(fields, prompt, keys)
        if isinstance(prompt, list) and prompt and prompt[-1].get("role") == "assistant":
            raise ValueError("the assistant's words before a completion must be part of it")
    ground_truth = fields.get(label_key) if label_key else _take_ground_truth(fields)
    names = {
        name: _check_type(fields.pop(name, ""), str, name=name)
        for name in ("data_source", "environment")
    }
    extra_info = _check_type(fields.pop("extra_info", {}), dict, name="extra_info")
    tools, arguments = fields.get("tools", []), fields.get("chat_template_kwargs", {})
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools must be a list of objects, got {_describe_type(tools)}")
    return DataRow(
        location=location,
        index=index,
        messages=_normalize_messages(prompt, name=prompt_key),
        ground_truth=ground_truth,
        extra_info=fields | extra_info,
        is_chat=not isinstance(prompt, str),
        tools=tools,
        template_arguments=_check_type(arguments, dict, name="chat_template_kwargs"),
        completions=completions,
        pieces=pieces,
        **names,
    )


def _parse_json_texts(
    record: Mapping[str, Any], texts: Collection[str], label_key: str
) -> dict[str, Any]:
    """Parse the columns that may be JSON text; those of `texts` may be messages or plain text."""
    parsed = dict(record)
    for name in JSON_COLUMNS:
        if isinstance(text := parsed.get(name), str) and name not in (*texts, label_key):
            try:
                parsed[name] = parse_json(text) if text.strip() else None
            except ValueError as error:
                raise ValueError(f"{name} is text, which must be JSON: {error}") from None
    for name in texts:
        if isinstance(text := parsed.get(name), str):
            parsed[name] = _parse_messages(text, name)
    return parsed


def _take_completions(
    fields: dict[str, Any], prompt: Any, keys: RowKeys
) -> tuple[Any, tuple[Messages, ...]]:
    """Remove the completions from a row's fields; return its prompt and them."""
    columns, last_turn = COMPLETION_COLUMNS[keys.gives], keys.last_turn
    if keys.gives == TARGETS and "completion" not in fields:
        name = "messages" if "messages" in fields else keys.prompt_key
        messages = _normalize_messages(fields.pop("messages", prompt), name=name)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or not turns[-last_turn]:
            raise ValueError(
                f"{name} needs a message of the assistant after another, or the row a completion"
            )
        start = turns[-last_turn]
        return list(messages[:start]), (messages[start : turns[-1] + 1],)
    completions = []
    for name in columns:
        value = fields.pop(name, None)
        if isinstance(value, str):
            value = [{"role": "assistant", "content": value}]
        completions.append(_normalize_messages(value, name=name))
    if keys.gives == PAIRS and completions[0] == completions[1]:
        raise ValueError("chosen and rejected are equal")
    if prompt is None:
        pairs = zip(*completions, strict=False)
        shortest = min(map(len, completions))
        start = next((i for i, pair in enumerate(pairs) if pair[0] != pair[-1]), shortest)
        prompt = list(completions[0][:start])
        completions = [messages[start:] for messages in completions]
    for name, messages in zip(columns, completions, strict=True):
        ends = messages[:1] + messages[-1:]
        if not ends or any(message["role"] != "assistant" for message in ends):
            raise ValueError(f"{name} must begin and end with a message of the assistant")
    return prompt, tuple(completions)


def _parse_messages(text: str, name: str) -> Any:
    """Parse chat messages as JSON text; return other text unchanged."""
    try:
        messages = parse_json(text) if text.lstrip().startswith("[") else None
    except ValueError as error:
        if _CHAT_PATTERN.match(text):
            raise ValueError(
                f"{name} looks like chat messages, which must be JSON: {error}"
            ) from None
        return text
    is_chat = isinstance(messages, list) and any(
        isinstance(m, dict) and "role" in m for m in messages
    )
    return messages if is_chat else text


def _take_ground_truth(fields: dict[str, Any]) -> Any:
    rule = _check_type(fields.pop("reward_model", {}), dict, name="reward_model")
    if "ground_truth" in rule and "ground_truth" in fields:
        raise ValueError("ground_truth occurs at the top level and in reward_model; keep one")
    return fields.pop("ground_truth", rule.get("ground_truth"))


def _normalize_messages(prompt: Any, *, name: str) -> tuple[Mapping[str, Any], ...]:
    """Check chat messages, and join the content parts of each into one text."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        kind = _describe_type(prompt)
        raise ValueError(f"{name} must be text or a list of chat messages, got {kind}")
    messages = []
    for number, message in enumerate(prompt, 1):
        where = f"message {number} of {name}"
        _check_type(message, dict, name=where)
        # An assistant message with tool calls may omit its content.
        content = message.get("content", "" if "tool_calls" in message else None)
        if isinstance(content, list):
            content = "".join(_get_part_text(part, where) for part in content)
        for key, value in (("role", message.get("role")), ("content", content)):
            text = _check_type(value, str, name=f"{key} of {where}")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{key} of {where} is not valid Unicode") from None
        messages.append({**message, "content": content})
    return tuple(messages)


def _get_part_text(part: Any, where: str) -> str:
    """Return the text of a content part. Raises ValueError for images and other types."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else _describe_type(part)
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"content of {where} has a part of type {kind}; only text is supported")
    return str(part["text"])


def _check_type(value: Any, expected: type, word: str = "", *, name: str) -> Any:
    if not isinstance(value, expected):
        word = word or ("text" if expected is str else "an object")
        raise ValueError(f"{name} must be {word}, got {_describe_type(value)}".lstrip())
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
