"""A build is made once, also by concurrent processes, from a model that reaches its bar."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.toy_models.building import MAX_ATTEMPTS, Build, repeat_until_reached

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
from pathlib import Path

from examples.toy_models.building import Build

out = Path(sys.argv[1])

def fill(folder, seed):
    with out.with_name("filled.txt").open("a") as log:
        log.write("filled\\n")
    time.sleep(0.3)
    return {}

Build("toy", out, 1, fill).make(out, seed=0)
"""


def test_concurrent_processes_make_a_build_once(tmp_path: Path):
    out = tmp_path / "build"
    words = [sys.executable, "-c", SCRIPT, str(out)]
    both = [subprocess.Popen(words, cwd=ROOT) for _ in range(2)]
    assert [process.wait(60.0) for process in both] == [0, 0]
    assert (tmp_path / "filled.txt").read_text() == "filled\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "filled.txt"]
    build = Build("toy", out, 1, lambda folder, seed: {})
    assert build.is_made(out, seed=0)
    with pytest.raises(SystemExit, match="no build of format 1 with seed 1"):
        build.make(out, seed=1)


def test_models_are_made_from_other_seeds_until_one_reaches_the_bar():
    rates = {3: 0.89, 1003: 0.12, 2003: 0.98}
    reached = repeat_until_reached(
        lambda seed: {"likeliest": rates[seed], "solved": 0.4},
        {"likeliest": 0.98},
        task="t",
        seed=3,
    )
    assert reached == {"measured": {"likeliest": 0.98, "solved": 0.4}, "attempts": 3}


def test_a_build_without_a_model_that_reaches_the_bar_fails_and_leaves_no_folder(tmp_path: Path):
    seeds = []

    def attempt(seed: int) -> dict[str, float]:
        seeds.append(seed)
        return {"rate": 0.1}

    def fill(folder: Path, seed: int) -> dict[str, object]:
        (folder / "base_model").mkdir()
        return repeat_until_reached(attempt, {"rate": 0.5}, task="toy", seed=seed)

    with pytest.raises(SystemExit, match=r"6 models failed: rate is below 0.5; choose another"):
        Build("toy", tmp_path / "build", 1, fill).make(tmp_path / "build", seed=0)
    assert len({*seeds}) == MAX_ATTEMPTS
    assert list(tmp_path.iterdir()) == []
