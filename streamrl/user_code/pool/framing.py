"""Wire format between a pool and its workers: length-prefixed pickles."""

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

_LENGTH_HEADER = struct.Struct("!Q")
HEADER_BYTES = _LENGTH_HEADER.size


def pack_message(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH_HEADER.pack(len(body)) + body


def unpack_length(header: bytes) -> int:
    (size,) = _LENGTH_HEADER.unpack(header)
    return int(size)


_ALLOWED_CLASSES = frozenset(
    {
        ("streamrl.environments.hosts.host_protocol", "EnvironmentDescription"),
        ("streamrl.environments.hosts.host_protocol", "EnvironmentShape"),
        ("streamrl.environments.hosts.host_protocol", "HostResponse"),
        ("streamrl.environments.interface", "CallOutcome"),
        ("streamrl.environments.interface", "EnvironmentStep"),
        ("streamrl.environments.interface", "ResetResult"),
        ("streamrl.user_code.rewards.user_function", "FunctionCallSpec"),
        ("streamrl.user_code.reward_result", "RewardResult"),
        ("streamrl.user_code.reward_result", "RewardOutcome"),
        ("streamrl.user_code.service_gate", "Outage"),
    }
)
"""Classes allowed in responses of workers, as (module, class name)."""


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler for plain data and _ALLOWED_CLASSES.

    A worker runs untrusted code: a response must not execute anything in the pool's process.
    """

    def find_class(self, module: str, name: str) -> Any:
        loaded = super().find_class(module, name) if (module, name) in _ALLOWED_CLASSES else None
        # Modules re-export names, and a dotted name ("Class.method.__globals__") resolves to any
        # function: accept only a class defined in the module itself.
        if not isinstance(loaded, type) or loaded.__module__ != module:
            raise pickle.UnpicklingError(f"{module}.{name} is not an allowed class")
        return loaded


def unpickle_response(body: bytes) -> Any:
    """Unpickle plain data and _ALLOWED_CLASSES. Malformed bytes may raise any exception."""
    return _RestrictedUnpickler(io.BytesIO(body)).load()


def read_message(read: Callable[[int], bytes]) -> Any:
    """Read and unpickle the next message; raise EOFError at the end of the stream.

    For worker processes, which trust the pool: unpickles any class. The pool reads responses with
    `unpickle_response`.
    read: called with a number of bytes n; returns n bytes, or fewer at the end of the stream.
    """
    header = read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise EOFError
    return pickle.loads(read(unpack_length(header)))
