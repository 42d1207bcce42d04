"""Columns as safetensors blobs and views; prompts as msgpack, whose decoding executes no code."""

import datetime
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

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
    decode_prompt,
    encode_columns,
    encode_prompt,
    join_pieces,
)
from streamrl.errors import JournalError
from streamrl.messages import COLUMN_SPECS, Columns, Prompt
from tests.buffer.shards import rollouts
from tests.hostile_pickle import Hostile

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


ZONE = datetime.timezone(datetime.timedelta(hours=2))
VALUES = [
    *(None, True, 0, -1, 2**63, -(2**63), 10**30, -(10**30), 0.5, "text", "ä \ud800", b"\x80"),
    *(Decimal("1.10"), datetime.date(2024, 2, 29), datetime.time(1, 2), datetime.timedelta(-1, 5)),
    *(datetime.datetime(2024, 1, 2, 3), datetime.datetime(2024, 1, 2, tzinfo=ZONE)),
    *([1, [2, {"a": [10**30]}]], {"b": {"c": "\udfff"}}),
]


def prompt(value: Any) -> Prompt:
    extra = {"value": value}
    chat = [{"role": "user", "content": "1+1"}]
    row = (chat, "set", value, extra, "rows:3", False, "guess")
    return Prompt("0:1:0", np.array([1, 2], np.int32), *row)


def fields(decoded: Prompt) -> list[Any]:
    return [decoded.token_ids.tolist(), *(getattr(decoded, name) for name in NAMES)]


NAMES = [name for name in Prompt.__struct_fields__ if name != "token_ids"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_prompt_with_any_row_value_round_trips(value: Any):
    decoded = decode_prompt(encode_prompt(prompt(value)))
    assert fields(decoded) == fields(prompt(value))
    assert type(decoded.ground_truth) is type(value)
    assert decoded.token_ids.dtype == np.int32


def test_numpy_numbers_and_tuples_become_plain_values():
    decoded = decode_prompt(encode_prompt(prompt((np.float32(0.5), np.array([1, 2])))))
    assert decoded.ground_truth == [0.5, [1, 2]]


def test_unsupported_value_raises_with_its_type():
    with pytest.raises(TypeError, match=r"builtins\.object"):
        encode_prompt(prompt(object()))


def test_hostile_pickle_executes_nothing(tmp_path: Path):
    hostile = pickle.dumps(prompt(Hostile(tmp_path / "ran")))
    for data in (hostile, pickle.dumps(Hostile(tmp_path / "ran"))):
        with pytest.raises(JournalError, match="cannot be read"):
            decode_prompt(data)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc1", b"\x90", b"\x98" + b"\x01" * 8, b"[" * 9])
def test_invalid_prompt_bytes_raise_journal_error(data: bytes):
    with pytest.raises(JournalError):
        decode_prompt(data)
