"""The benchmark plans every requested pair of layouts and executes one."""

import json
import subprocess
import sys

import pytest


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
    options = (f"--train={train}", f"--generate={generate}", "--model=transformer", "--rounds=1")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resharding", *options, "--bucket-mb=0.01", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
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
