"""Prompt codec: row values round-trip, and decoding executes no code."""

import datetime
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.buffer.encoding import decode_prompt, encode_prompt
from streamrl.errors import JournalError
from streamrl.messages import Prompt
from tests.hostile_pickle import Hostile

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
