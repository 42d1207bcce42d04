"""Prompts as bytes: msgpack of plain values, so that reading a journal executes nothing.

What msgpack lacks and a data row may hold (whole numbers beyond 64 bits, decimals, dates, text that
is no UTF-8) travels in extension types, and comes back as what it was; a tuple comes back as a
list. Journals once held pickles: of these, only what streamrl itself wrote is read, by a reader
that can call nothing else.
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
"""First byte of a pickle; msgpack has it for an empty map, which no prompt is."""
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
    """Return a prompt as bytes. Raises TypeError naming a value that no data row may hold."""
    rest = (prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info)
    parts = (prompt.uid, prompt.token_ids.tobytes(), *map(_to_plain, rest))
    return _to_msgpack((*parts, _to_plain(prompt.row_location), prompt.is_chat))


def decode_prompt(data: bytes) -> Prompt:
    """Return the prompt that `encode_prompt` made. Raises JournalError for any other bytes."""
    if data[:1] == _PICKLE_PREFIX:
        return _unpickle_prompt(data)
    try:
        uid, tokens, *rest = _from_msgpack(data)
        return prompt_from_parts(uid, tokens, *rest)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise JournalError(f"a prompt in the journal cannot be read: {error}") from error


def _to_plain(value: Any) -> Any:
    """A value with everything that msgpack would change, or refuse, in an extension type."""
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
        return {_to_plain(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _to_plain(value.tolist())
    return _encode_extension(value)


def _encode_extension(value: Any) -> msgspec.msgpack.Ext:
    for known, (code, write) in _EXTENSION_ENCODERS.items():
        if isinstance(value, known):
            return msgspec.msgpack.Ext(code, write(value))
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
    """Reads pickles that streamrl has written: prompts, and dates or decimals in their rows."""

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
        """Return what a pickle may call; raises UnpicklingError for anything else."""
        found = self._allowed_globals.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


def _unpickle_prompt(data: bytes) -> Prompt:
    try:
        found = _PromptUnpickler(io.BytesIO(data)).load()
    # There is nothing that a garbled pickle cannot raise.
    except Exception as error:
        raise JournalError(
            f"a prompt in the journal is no prompt of streamrl's: {error}"
        ) from error
    if not isinstance(found, Prompt):
        raise JournalError(f"a prompt in the journal is a {type(found).__name__}")
    return found
