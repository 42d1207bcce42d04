import pytest

from streamrl.environments.adapters.gymnasium import mark_colours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[41mS\x1b[0mFF", "[S]FF"),
        ("|\x1b[35mR\x1b[0m: |\x1b[43m \x1b[0m", "|[magenta:R]: |[yellow: ]"),
        ("\x1b[1mtitle\x1b[0m", "[title]"),
        ("\x1b[2J\x1b[1;1Hplain\x1b[0m", "plain"),
        ("no codes [x]", "no codes [x]"),
    ],
)
def test_colours_become_marks_and_other_sequences_go(text, expected):
    assert mark_colours(text) == expected
