"""Columns as bytes: one blob per commit, encoded once by whoever computed them.

The blob is in the safetensors format, so that a journal's payloads can be read by anything that
reads safetensors. The library copies every tensor twice to write it and once to read it; this is
the hot path of the queue, hence the few lines here: one copy to write, none to read. A large blob
stays in pieces, so that it is first copied when it is sent.
"""

from collections.abc import Mapping

import msgspec
import numpy as np

from streamrl.messages import Array, Columns

Buffer = bytes | bytearray | memoryview
Blob = Buffer | tuple[Buffer, ...]
"""Bytes, in one piece or in several that follow each other."""
LARGE_BLOB_BYTES = 100 * 1024
"""A blob of more than this comes in pieces: its header, and each column."""

_DTYPES: Mapping[str, np.dtype[np.generic]] = {
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
    """A column's line in the header."""

    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder(dict[str, _TensorHeader]).decode


def encode_columns(columns: Columns) -> Blob:
    """One safetensors blob of some columns [n]; the pieces of a large one are views of them.

    Raises KeyError for a dtype no column may have.
    """
    header: dict[str, _TensorHeader] = {}
    offset = 0
    # The widest first, so that every column starts at a multiple of its own item size.
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
    """The columns of a blob: views of its bytes, which are not copied."""
    first, *pieces = split_pieces(blob)
    start = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES], "little")
    header = _from_json(first[_LENGTH_BYTES:start])
    if pieces:
        return {
            name: np.frombuffer(piece, _DTYPES[place.dtype])
            for (name, place), piece in zip(header.items(), pieces, strict=True)
        }
    return {
        name: np.frombuffer(
            first, _DTYPES[place.dtype], place.shape[0], start + place.data_offsets[0]
        )
        for name, place in header.items()
    }


def split_pieces(blob: Blob) -> tuple[Buffer, ...]:
    """The pieces of a blob, or the blob as its only one."""
    return blob if isinstance(blob, tuple) else (blob,)


def count_blob_bytes(blob: Blob) -> int:
    """Bytes of a blob."""
    return sum(map(len, blob)) if isinstance(blob, tuple) else len(blob)


def join_pieces(blob: Blob) -> bytes:
    """A blob as bytes of its own."""
    return b"".join(split_pieces(blob))
