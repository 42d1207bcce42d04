"""Arguments of the benchmark of placement modes."""

import pytest

from benchmarks import placement_modes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--steps", "1"], "argument --steps: 1: must be a whole number, 2 or more"),
        (["--repeats", "0"], "argument --repeats: 0: must be a whole number, 1 or more"),
        (["--steps", "many"], "argument --steps: many: must be a whole number, 2 or more"),
        (["--stepz", "3"], "unrecognized arguments: --stepz 3"),
    ],
)
def test_benchmark_reports_a_bad_argument_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        placement_modes.main(arguments)
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert output.err.startswith(f"placement_modes: {line}") and output.err.count("\n") == 1
    assert not output.out
