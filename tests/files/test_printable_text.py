"""Text in messages and for the terminal."""

from streamrl.files.printable_text import shorten_text


def test_a_long_text_keeps_both_ends():
    assert [shorten_text(text, 7) for text in ("abcdefg", "abcdefgh")] == ["abcdefg", "ab...gh"]
