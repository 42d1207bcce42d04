"""Column codec: safetensors blobs, round trips, views."""

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streamrl.buffer.encoding import (
    LARGE_BLOB_BYTES,
    count_blob_bytes,
    decode_columns,
    encode_columns,
    join_pieces,
)
from streamrl.messages import COLUMN_SPECS, Columns
from tests.buffer.shards import rollouts

DTYPES = ("int32", "int8", "uint8", "float32", "bool", "int64")
column_dicts = st.dictionaries(
    st.sampled_from([*COLUMN_SPECS, "reward/exact", "reward/na\u00efve"]),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(np.dtype(dtype), st.integers(0, 40))
    ),
)


def assert_equal(column_dicts: Columns, expected: Columns) -> None:
    assert column_dicts.keys() == expected.keys()
    for name, column in expected.items():
        assert column_dicts[name].dtype == column.dtype
        np.testing.assert_array_equal(column_dicts[name], column)


@given(column_dicts)
def test_blobs_are_compatible_with_safetensors(columns: Columns):
    assert_equal(safetensors.numpy.load(join_pieces(encode_columns(columns))), columns)
    assert_equal(decode_columns(safetensors.numpy.save(dict(columns))), columns)


@given(column_dicts)
def test_columns_are_aligned_to_their_item_size(columns: Columns):
    blob = join_pieces(encode_columns(columns))
    start = np.frombuffer(blob, np.uint8).__array_interface__["data"][0]
    for column in decode_columns(blob).values():
        if column.size:
            offset = column.__array_interface__["data"][0] - start
            assert offset % column.itemsize == 0
    assert (8 + int.from_bytes(blob[:8], "little")) % 8 == 0


LARGE = {
    "token_ids": np.arange(LARGE_BLOB_BYTES // 4, dtype=np.int32),
    "loss_mask": np.ones(LARGE_BLOB_BYTES // 4, np.bool_),
    "lengths": np.zeros(0, np.int32),
}


def test_large_blob_stays_in_pieces():
    blob = encode_columns(LARGE)
    assert isinstance(blob, tuple)
    assert_equal(decode_columns(blob), LARGE)
    assert np.shares_memory(decode_columns(blob)["token_ids"], LARGE["token_ids"])
    joined = join_pieces(blob)
    assert len(joined) == count_blob_bytes(blob) > LARGE_BLOB_BYTES
    assert_equal(decode_columns(joined), LARGE)
    assert_equal(safetensors.numpy.load(joined), LARGE)


def test_decoded_columns_are_views_of_the_blob():
    blob = bytearray(join_pieces(encode_columns(rollouts())))
    decoded = decode_columns(blob)
    for column in decoded.values():
        assert np.shares_memory(column, np.frombuffer(blob, np.uint8))
    blob[-1] ^= 0xFF
    assert any((decoded[name] != column).any() for name, column in rollouts().items())


def test_strided_column_is_encoded_contiguously():
    gaps = {"lengths": np.arange(10, dtype=np.int32)[::3]}
    assert decode_columns(encode_columns(gaps))["lengths"].tolist() == [0, 3, 6, 9]


def test_unsupported_dtype_raises():
    with pytest.raises(KeyError, match="float64"):
        encode_columns({"scores": np.zeros(2)})
