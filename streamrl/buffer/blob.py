"""Columns as bytes: one blob per commit, encoded once by whoever computed them.

The blob is in the safetensors format, so that a journal's payloads can be read by anything that
reads safetensors. The library copies every tensor twice to write it and once to read it; this is
the hot path of the queue, hence the few lines here: one copy to write, none to read.
"""

import json
from collections.abc import Mapping

import numpy as np

from streamrl.messages import Array, Columns

Buffer = bytes | bytearray | memoryview

_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F32": np.dtype(np.float32),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8


def encode(columns: Columns) -> bytes:
    """One safetensors blob of some columns [n]. Raises KeyError for a dtype no column may have."""
    header: dict[str, object] = {}
    offset = 0
    # The widest first, so that every column starts at a multiple of its own item size.
    ordered = sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, column in ordered:
        end = offset + column.nbytes
        header[name] = {
            "dtype": _NAMES[column.dtype],
            "shape": column.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    arrays = [np.ascontiguousarray(column).data for _, column in ordered]
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *arrays])


def decode(blob: Buffer) -> dict[str, Array]:
    """The columns of a blob: views of its bytes, which are not copied."""
    view = memoryview(blob)
    start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    header = json.loads(bytes(view[_LENGTH_BYTES:start]))
    columns: dict[str, Array] = {}
    for name, facts in header.items():
        first, last = facts["data_offsets"]
        data = view[start + first : start + last]
        columns[name] = np.frombuffer(data, _DTYPES[facts["dtype"]]).reshape(facts["shape"])
    return columns
