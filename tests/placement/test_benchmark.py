"""The benchmark of placements, as far as it goes without playing any."""

import pytest

from benchmarks import placement_modes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "1"], "argument --steps: 1: must be a whole number, 2 or more"),
        (["--repeats", "0"], "argument --repeats: 0: must be a whole number, 1 or more"),
        (["--steps", "many"], "argument --steps: many: must be a whole number, 2 or more"),
        (["--stepz", "3"], "unrecognized arguments: --stepz 3"),
    ],
)
def test_a_bad_argument_is_one_clear_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        placement_modes.main(words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith(f"placement_modes: {line}") and said.err.count("\n") == 1
    assert not said.out
