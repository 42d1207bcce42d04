"""The benchmark plans every requested pair of layouts and executes one."""

import json
import subprocess
import sys

import pytest

from benchmarks import resharding


def make_arguments(train: str, generate: str, **settings: object) -> list[str]:
    options = {"train": train, "generate": generate, **settings}
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.resharding", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("train", "generate", "groups"),
    [
        ("4-1-1", "2-1-2-1", [[0, 1], [2, 3]]),
        pytest.param("1-3-1", "1-1-3-1", [[0, 1, 2]], marks=pytest.mark.slow),
    ],
)
def test_unequal_stages_and_odd_sizes_are_executed(
    train: str, generate: str, groups: list[list[int]]
):
    arguments = make_arguments(train, generate, model="transformer", rounds=1, bucket_mb=0.01)
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout)
    assert results["groups"]["micro_data"] == groups
    assert set(results["ways"]) == {"in_groups", "point_to_point", "full_gather"}
    ranks = sum(map(len, groups))
    for way, figures in results["ways"].items():
        assert figures["bit_exact"], way
        assert figures["received_of_M"] == figures["planned_of_M"], way
        assert figures["peak_of_M"] == figures["planned_peak_of_M"], way
        if way != "full_gather":
            assert figures["redundant_of_M"] == ["0"] * ranks


BAD = [
    ({"bucket_mb": "nan"}, "--bucket-mb=nan: must be at least 32 bytes"),
    ({"generate": "1-8-1-1"}, "grouping zero: 1-8-1-1 must divide 1-4-2"),
]


@pytest.mark.parametrize(("options", "line"), BAD, ids=[f"{bad}" for bad, _ in BAD])
def test_an_invalid_argument_gives_a_one_line_error(
    options: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
):
    arguments = {"train": "1-4-2", "generate": "1-2-2-2", **options}
    with pytest.raises(SystemExit) as ended:
        resharding.main(make_arguments(**arguments))
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert output.err.startswith(f"resharding: {line}") and output.err.count("\n") == 1
    assert not output.out
