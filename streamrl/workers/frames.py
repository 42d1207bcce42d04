"""What passes between a pool and its workers: pickled messages, each behind its length."""

import pickle
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!Q")
HEADER_BYTES = _LENGTH.size


def pack(message: Any) -> bytes:
    """A message as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def length(header: bytes) -> int:
    """Bytes that follow a header."""
    (size,) = _LENGTH.unpack(header)
    return int(size)


def receive(read: Callable[[int], bytes]) -> Any:
    """The next message by `read`, which blocks until it has so many bytes, or fewer at the end.

    Raises EOFError if there is no more.
    """
    header = read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise EOFError
    return pickle.loads(read(length(header)))
