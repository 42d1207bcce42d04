"""What passes between a pool and its workers: pickled messages, each behind its length."""

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

_LENGTH_HEADER = struct.Struct("!Q")
HEADER_BYTES = _LENGTH_HEADER.size


def pack_message(message: Any) -> bytes:
    """A message as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH_HEADER.pack(len(body)) + body


def unpack_length(header: bytes) -> int:
    """Bytes that follow a header."""
    (size,) = _LENGTH_HEADER.unpack(header)
    return int(size)


_ALLOWED_CLASSES = frozenset(
    {
        ("streamrl.rewards.user_code.user_function", "FunctionCallSpec"),
        ("streamrl.rewards.interface.verdict", "RewardResult"),
        ("streamrl.rewards.interface.verdict", "RewardOutcome"),
    }
)
"""The classes whose objects workers answer with: a module, and what is defined in it."""


class _RestrictedUnpickler(pickle.Unpickler):
    """Makes objects of those classes and of plain data only.

    A worker runs what others wrote: what it sends must not run anything where it arrives. A module
    has others' names too, and a name with a dot reaches through them to any function there is.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if (module, name) in _ALLOWED_CLASSES else None
        if not isinstance(found, type) or found.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain data")
        return found


def unpickle_response(body: bytes) -> Any:
    """What a worker sent. Raises whatever pickle does for what is no answer."""
    return _RestrictedUnpickler(io.BytesIO(body)).load()


def read_message(read: Callable[[int], bytes]) -> Any:
    """The next message by `read`, which blocks until it has so many bytes, or fewer at the end.

    Raises EOFError if there is no more.
    """
    header = read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise EOFError
    return pickle.loads(read(unpack_length(header)))
