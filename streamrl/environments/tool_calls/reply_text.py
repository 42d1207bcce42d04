"""Results and errors of tools as text for the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.files.python_module import format_failure


def format_tool_result(value: Any) -> str:
    """Return what a tool returned as text: text as it is, None as "", other values as JSON.

    Bytes are decoded as UTF-8. Bytes and characters that UTF-8 does not allow become U+FFFD. Raises
    TypeError for a value that JSON does not have.
    """
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="replace")
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise TypeError(f"a tool returned {kind}, not text or JSON: {error}") from None
    return replace_surrogates(value)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, as in the names of files, which UTF-8 cannot encode, by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def format_tool_error(error: BaseException, file: str) -> str:
    """Return an exception of a tool as text: innermost line in the user's file, type and message.

    file: path of the user's file; the text has only its name, as paths differ between machines.
    """
    failure = format_failure(file, error).removeprefix(file)
    return replace_surrogates(f"error: {Path(file).name}{failure}")


def cut_middle(text: str, max_chars: int, *, num_missing: int = 0) -> tuple[str, int]:
    """Cut characters out of the middle of a text; return it and how many were left out.

    Keeps `max_chars` characters, half of them from each end, around a mark that says how many are
    missing. num_missing: characters that are missing in the middle already; then `text` has at
    least `max_chars` characters on both sides of the gap.
    """
    left_out = len(text) - max_chars + num_missing
    if left_out <= 0:
        return text, 0
    tail = max_chars // 2
    head = max_chars - tail
    mark = f"\n[... {left_out} characters left out ...]\n"
    return f"{text[:head]}{mark}{text[len(text) - tail :]}", left_out


def make_call_id(number: int) -> str:
    """Return the id of call `number` of a reply, which the tool message answers.

    Nine letters and digits: Mistral's templates refuse other ids.
    """
    return f"call{number:05}"


def make_call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return call `number` of an assistant's message.

    Arguments are objects, as chat templates take them; OpenAI's API has JSON text there.
    """
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": make_call_id(number), "type": "function", "function": function}
