"""The benchmark of placements, as far as it goes without playing any."""

import pytest

from benchmarks import placement_modes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "1"], "--steps=1: must be at least 2"),
        (["--repeats", "0"], "--repeats=0: must be at least 1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
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
