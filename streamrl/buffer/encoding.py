"""Bytes of columns and prompts, and the messages between a shard and its clients.

Columns are encoded once, by the process that computes them: one blob per commit, in the safetensors
format, so that any safetensors reader can read a journal's payloads. The safetensors library copies
every tensor twice on writing and once on reading. Encoding is the hot path of the queue, hence this
module: one copy on writing, zero on reading. A large blob stays in pieces; sending makes the first
copy.

Prompts are msgpack of plain values; reading executes no code. Extension types carry the values of a
data row that msgpack lacks: integers beyond 64 bits, decimals, dates, text that is not UTF-8.
Decoding restores these values exactly; only tuples become lists.
"""

import datetime
import zlib
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from streamrl.errors import JournalError
from streamrl.messages import (
    Array,
    Columns,
    GroupInfo,
    GroupLease,
    GroupOutcome,
    Prompt,
    find_replayed_uid,
    prompt_from_parts,
)

Buffer = bytes | bytearray | memoryview
Blob = Buffer | tuple[Buffer, ...]
"""Bytes in one piece, or in consecutive pieces."""
LARGE_BLOB_BYTES = 100 * 1024
"""Size above which a blob comes in pieces: its header, then each column."""

OUT_OF_BAND_BYTES = 4 * 1024
"""Buffers above this size travel beside the pickle without a copy."""

_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F32": np.dtype(np.float32),
    "BOOL": np.dtype(np.bool_),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8


class _TensorHeader(msgspec.Struct):
    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder(dict[str, _TensorHeader]).decode


def encode_columns(columns: Columns) -> Blob:
    """Encode named flat arrays as one blob in safetensors format.

    A large blob comes in pieces that are views of the arrays. Raises KeyError for an unsupported
    dtype.
    """
    header: dict[str, _TensorHeader] = {}
    offset = 0
    # Widest dtype first: every column then starts at a multiple of its item size.
    ordered = sorted(columns.items(), key=lambda item: -item[1].itemsize)
    for name, column in ordered:
        end = offset + column.nbytes
        header[name] = _TensorHeader(_DTYPE_NAMES[column.dtype], (column.size,), (offset, end))
        offset = end
    text = _to_json(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    if offset <= LARGE_BLOB_BYTES:
        return b"".join([head, *(column.tobytes() for _, column in ordered)])
    return (head, *(np.ascontiguousarray(column).view(np.uint8).data for _, column in ordered))


def decode_columns(blob: Blob) -> dict[str, Array]:
    """Decode a safetensors blob into named arrays that are views of the blob's bytes."""
    first, *pieces = split_pieces(blob)
    start = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
    header = _from_json(first[_LENGTH_BYTES:start])
    if pieces:
        return {
            name: np.frombuffer(piece, _DTYPES[tensor.dtype])
            for (name, tensor), piece in zip(header.items(), pieces, strict=True)
        }
    return {
        name: np.frombuffer(
            first, _DTYPES[tensor.dtype], tensor.shape[0], start + tensor.data_offsets[0]
        )
        for name, tensor in header.items()
    }


def split_pieces(blob: Blob) -> tuple[Buffer, ...]:
    return blob if isinstance(blob, tuple) else (blob,)


def count_blob_bytes(blob: Blob) -> int:
    return sum(map(len, blob)) if isinstance(blob, tuple) else len(blob)


def join_pieces(blob: Blob) -> bytes:
    return b"".join(split_pieces(blob))


def to_message(blob: Blob) -> Any:
    """Return a blob in picklable form: bytes, or numpy views without a copy if large."""
    if isinstance(blob, tuple):
        return [to_message(piece) for piece in blob]
    return np.frombuffer(blob, np.uint8) if len(blob) > OUT_OF_BAND_BYTES else bytes(blob)


def from_message(blob: Any) -> Blob:
    """Invert `to_message`; views are not copied."""
    if isinstance(blob, list):
        return tuple(map(memoryview, blob))
    return blob if isinstance(blob, bytes) else memoryview(blob)


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
    uid, tokens, *rest, targets = msgspec.structs.astuple(prompt)
    rest += [targets] if targets else []
    return _to_msgpack((uid, tokens.tobytes(), *map(_to_plain, rest)))


def decode_prompt(data: bytes) -> Prompt:
    """Decode a prompt from a journal. Raises JournalError for bytes that streamrl did not write."""
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


class LeaseGrant(msgspec.Struct, frozen=True, eq=False):
    """Reply of a shard that delivers a leased group; the client decodes it into an `Experience`.

    `prompt` is encoded. `blobs` contain the requested columns, and possibly more.
    `partial_rollouts` holds at most one blob, saved by an earlier holder of the stage.
    """

    lease: GroupLease
    admitted_version: int
    info: GroupInfo | None
    ready_version: int | None
    outcome: GroupOutcome | None
    prompt: bytes | None
    blobs: tuple[Any, ...]
    partial_rollouts: tuple[Any, ...] = ()


class ColumnBlobs(tuple[Any, ...]):
    """Blobs that contain the requested columns of a group, and possibly more columns."""

    __slots__ = ()


class ColumnCommit(msgspec.Struct, frozen=True, eq=False):
    """Encoded columns that a stage commits for a leased group.

    `column_sizes`: entries of each column. `info` is None if the columns are not those of rollouts.
    `pass_rate` is that of the scored group; None from other stages.
    """

    lease: GroupLease
    blob: Blob
    column_sizes: Mapping[str, int]
    info: GroupInfo | None = None
    pass_rate: float | None = None

    @property
    def uid(self) -> str:
        return self.lease.uid

    def __reduce__(self) -> tuple[Any, ...]:
        message = to_message(self.blob)
        facts = (self.lease, message, self.column_sizes, self.info, self.pass_rate)
        return _unpickle_commit, facts


def _unpickle_commit(
    lease: GroupLease,
    message: Any,
    column_sizes: Mapping[str, int],
    info: GroupInfo | None,
    pass_rate: float | None,
) -> ColumnCommit:
    return ColumnCommit(lease, from_message(message), column_sizes, info, pass_rate)


class FinishedGroup(msgspec.Struct, frozen=True):
    """A filtered or dropped group that the coordinator has not yet removed from the queue.

    `info` is None if the group ended before its rollouts were generated.
    """

    uid: str
    outcome: GroupOutcome
    info: GroupInfo | None


def get_shard_index(uid: str, count: int) -> int:
    """Return the index of the shard that owns a uid; equal in every process (CRC-32).

    A replay is in the shard of the group that it replays.
    """
    return zlib.crc32((find_replayed_uid(uid) or uid).encode()) % count
