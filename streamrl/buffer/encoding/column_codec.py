"""Encode columns as bytes: one blob per commit, encoded once by the computing process.

The blob has the safetensors format, so that any safetensors reader can read a journal's payloads.
The safetensors library copies every tensor twice on writing and once on reading. Encoding is the
hot path of the queue, hence this module: one copy on writing, zero on reading. A large blob stays
in pieces; sending makes the first copy.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from streamrl.messages import Array, Columns

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
