"""Text of tool results and errors, and cuts in its middle."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.tool_calls.reply_text import (
    cut_middle,
    format_tool_error,
    format_tool_result,
)
from streamrl.files.python_module import import_file


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("3<|im_end|>", "3<|im_end|>"),
        ("", ""),
        (None, ""),
        (3, "3"),
        (True, "true"),
        ({"caf\xe9": [1, None]}, '{"caf\xe9": [1, null]}'),
        (b"caf\xc3\xa9 \xff", "caf\xe9 \ufffd"),
        ("half \ud800 pair", "half \ufffd pair"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_a_tool_result_becomes_text(value: Any, text: str):
    assert format_tool_result(value) == text


def test_a_result_that_json_does_not_have_is_an_error():
    with pytest.raises(TypeError, match="a tool returned set, not text or JSON"):
        format_tool_result({1})


def test_an_error_names_type_message_and_line_but_no_folder(tmp_path: Path):
    file = tmp_path / "calculator.py"
    file.write_text("def divide(a):\n    return inner(a)\ndef inner(a):\n    return a / 0\n")
    module = import_file(str(file), setting="environment.path")
    with pytest.raises(ZeroDivisionError) as caught:
        module.divide(1)
    text = format_tool_error(caught.value, str(file))
    assert text == "error: calculator.py:4: ZeroDivisionError: division by zero"


@given(st.text(), st.integers(0, 20))
def test_a_cut_keeps_both_ends_and_counts_the_rest(text: str, limit: int):
    shown, left_out = cut_middle(text, limit)
    assert left_out == max(0, len(text) - limit)
    if left_out:
        head, tail = limit - limit // 2, limit // 2
        mark = f"\n[... {left_out} characters left out ...]\n"
        assert shown == text[:head] + mark + text[len(text) - tail :]
    else:
        assert shown == text
