"""Encode prompts for the journal as msgpack of plain values; reading executes no code.

Extension types carry the values of a data row that msgpack lacks: integers beyond 64 bits,
decimals, dates, text that is not UTF-8. Decoding restores these values exactly; only tuples become
lists. Journals of early versions hold pickles. The restricted unpickler here reads the pickles that
streamrl wrote, and can call nothing else.
"""

import datetime
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from streamrl.errors import JournalError
from streamrl.messages import Prompt, prompt_from_parts

_PICKLE_PREFIX = b"\x80"
"""First byte of a pickle. In msgpack the byte is an empty map, and a prompt is an array."""
_MSGPACK_INTEGERS = range(-(1 << 63), 1 << 64)
_EXTENSION_ENCODERS: Mapping[type, tuple[int, Callable[[Any], bytes]]] = {
    int: (1, lambda value: hex(value).encode()),
    Decimal: (2, lambda value: str(value).encode()),
    datetime.datetime: (3, lambda value: value.isoformat().encode()),
    datetime.date: (4, lambda value: value.isoformat().encode()),
    datetime.time: (5, lambda value: value.isoformat().encode()),
    datetime.timedelta: (
        6,
        lambda value: f"{value.days} {value.seconds} {value.microseconds}".encode(),
    ),
    str: (7, lambda value: value.encode("utf-8", "surrogatepass")),
}
_EXTENSION_DECODERS: Mapping[int, Callable[[bytes], Any]] = {
    1: lambda data: int(data, 16),
    2: lambda data: Decimal(data.decode()),
    3: lambda data: datetime.datetime.fromisoformat(data.decode()),
    4: lambda data: datetime.date.fromisoformat(data.decode()),
    5: lambda data: datetime.time.fromisoformat(data.decode()),
    6: lambda data: datetime.timedelta(*map(int, data.split())),
    7: lambda data: data.decode("utf-8", "surrogatepass"),
}


def encode_prompt(prompt: Prompt) -> bytes:
    """Encode a prompt as msgpack. Raises TypeError naming a value of an unsupported type."""
    rest = (prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info)
    parts = (prompt.uid, prompt.token_ids.tobytes(), *map(_to_plain, rest))
    origin = (_to_plain(prompt.row_location), prompt.is_chat, _to_plain(prompt.environment))
    return _to_msgpack((*parts, *origin))


def decode_prompt(data: bytes) -> Prompt:
    """Decode a prompt from a journal. Raises JournalError for bytes that streamrl did not write."""
    if data[:1] == _PICKLE_PREFIX:
        return _unpickle_prompt(data)
    try:
        uid, tokens, *rest = _from_msgpack(data)
        return prompt_from_parts(uid, tokens, *rest)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise JournalError(f"a prompt in the journal cannot be read: {error}") from error


def _to_plain(value: Any) -> Any:
    """Convert a value to plain msgpack types, using extension types where msgpack is lossy."""
    kind = type(value)
    if (
        value is None
        or kind in (bool, float, bytes)
        or (kind is int and value in _MSGPACK_INTEGERS)
    ):
        return value
    if kind is str and _is_utf8(value):
        return value
    if isinstance(value, Mapping):
        return {_to_plain(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _to_plain(value.tolist())
    return _encode_extension(value)


def _encode_extension(value: Any) -> msgspec.msgpack.Ext:
    """Encode a large integer, Decimal, date, time or non-UTF-8 text of a data row as an extension.

    Raises TypeError for a value of any other type.
    """
    for base, (code, encode) in _EXTENSION_ENCODERS.items():
        if isinstance(value, base):
            return msgspec.msgpack.Ext(code, encode(value))
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"{name} {value!r:.60}: no value of a data row")


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode_extension(code: int, data: memoryview) -> Any:
    if code not in _EXTENSION_DECODERS:
        raise ValueError(f"extension type {code}")
    return _EXTENSION_DECODERS[code](bytes(data))


_to_msgpack = msgspec.msgpack.Encoder().encode
_from_msgpack: Callable[[bytes], Sequence[Any]] = msgspec.msgpack.Decoder(
    list[Any], ext_hook=_decode_extension
).decode


class _PromptUnpickler(pickle.Unpickler):
    """Unpickler that can call only the types of prompts, dates and decimals."""

    _allowed_globals: Mapping[tuple[str, str], Any] = {
        ("streamrl.messages", "_prompt"): prompt_from_parts,
        ("decimal", "Decimal"): Decimal,
        **{
            ("datetime", kind.__name__): kind
            for kind in (
                *(datetime.datetime, datetime.date, datetime.time),
                *(datetime.timedelta, datetime.timezone),
            )
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        allowed = self._allowed_globals.get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(
                f"its pickle refers to {module}.{name}, which no prompt needs"
            )
        return allowed


def _unpickle_prompt(data: bytes) -> Prompt:
    """Decode a prompt that an early version of streamrl pickled."""
    try:
        prompt = _PromptUnpickler(io.BytesIO(data)).load()
    # A corrupt pickle can raise any exception.
    except Exception as error:
        raise JournalError(f"a prompt in the journal is invalid: {error}") from error
    if not isinstance(prompt, Prompt):
        raise JournalError(
            f"a prompt in the journal is invalid: its pickle is a {type(prompt).__name__}"
        )
    return prompt
