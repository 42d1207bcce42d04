"""`streamrl episodes`: which rollouts it shows, and in which form."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.telemetry.rollout_log import RecordedGroup, RolloutLog
from tests.telemetry.recorded import make_group, make_guess

Show = Callable[..., str]


def make_scored(uid: str, scores: Sequence[float]) -> RecordedGroup:
    return make_group([make_guess(f"guess {s}", score=s) for s in scores], uid=uid)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with rollouts of steps 2 and 5."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    log = RolloutLog(folder)
    log.write_groups(2, [make_scored("0:1:0", [1.0, 0.5]), make_scored("0:2:0", [0.75, 0.25])])
    log.write_groups(5, [make_scored("0:3:0", [0.0, 0.125])])
    return folder


@pytest.fixture
def show(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Run `streamrl episodes` on the run; return its output."""

    def run(*words: object) -> str:
        assert main(["episodes", str(run_dir), *map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("words", "uids"),
    [
        ((), ["0:3:0"]),
        (("--last", 2), ["0:1:0", "0:2:0", "0:3:0"]),
        (("--last", 99), ["0:1:0", "0:2:0", "0:3:0"]),
        (("--step", 2), ["0:1:0", "0:2:0"]),
        (("--uid", "0:2:0"), ["0:2:0"]),
        (("--last", 2, "--worst"), ["0:3:0", "0:2:0", "0:1:0"]),
    ],
)
def test_rollouts_are_chosen_by_step_or_uid(show: Show, words: Sequence[object], uids: list[str]):
    assert re.findall(r"uid (\S+):", show(*words)) == uids
    groups = json.loads(show(*words, "--json"))["groups"]
    assert [group["uid"] for group in groups] == uids


def test_the_worst_rollout_of_a_group_is_first(show: Show):
    (group,) = json.loads(show("--uid", "0:1:0", "--worst", "--json"))["groups"]
    assert [r["score"] for r in group["rollouts"]] == [0.5, 1.0]
    assert [r["relative_score"] for r in group["rollouts"]] == [-0.25, 0.25]


def test_bad_input_is_one_line(refuse: Show, run_dir: Path, tmp_path: Path):
    for words in (("--step", 4), ("--uid", "9:9:9")):
        error = refuse("episodes", run_dir, *words)
        assert error.endswith("no such rollouts are recorded; rollouts/ has 2 steps from 2 to 5")
    (tmp_path / "config.yaml").touch()
    assert "no rollouts/: telemetry.rollouts.every=0" in refuse("episodes", tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").touch()
    error = refuse("episodes", tmp_path)
    assert "rollouts/ has only step_*.jsonl, which versions up to 2026-11-26 wrote" in error
    assert "--last: 0: must be a whole number, at least 1" in refuse(
        "episodes", run_dir, "--last", 0
    )
    (run_dir / "rollouts" / "step_000006.parquet").write_text("no parquet")
    assert "step_000006.parquet: not recorded rollouts" in refuse("episodes", run_dir)
