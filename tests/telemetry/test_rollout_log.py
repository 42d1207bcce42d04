"""Recorded rollouts: written, read, and discarded on resume."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import ConfigError, DiskError
from streamrl.telemetry.rollout_log import (
    RolloutLog,
    list_recorded_steps,
    read_recorded_groups,
)

OLD_ROW: dict[str, Any] = {
    "uid": "0:1:0",
    "prompt": [{"role": "user", "content": "1+1"}],
    "ground_truth": "2",
    "rollouts": [
        {
            "completion": "2",
            "score": 1.0,
            "components": {"rule": 1.0, "judge": None},
            "verdicts": {"rule": "pass", "judge": "abstained"},
            "numbers": {"rule": {"length": 1.0}},
        },
        {"completion": "3", "score": 0.0},
    ],
}


def test_the_samples_of_a_step_have_a_separate_file(tmp_path: Path):
    log = RolloutLog(tmp_path)
    log.write_samples(1, [])
    assert not (tmp_path / "rollouts").exists()
    log.write_samples(2, [{"prompt": "1+1", "score": 1.0}, {"prompt": "ä", "score": 0.0}])
    lines = (tmp_path / "rollouts" / "step_000002.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["1+1", "ä"]


def test_samples_on_a_full_disk_raise_an_error_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskError, match=r"step_000002.jsonl cannot be written: No space left"):
        RolloutLog(tmp_path).write_samples(2, [{"score": 1.0}])


def test_resume_removes_the_samples_of_later_steps(tmp_path: Path):
    log = RolloutLog(tmp_path)
    for step in (1, 2, 3):
        log.write_samples(step, [{"step": step}])
    RolloutLog(tmp_path).discard_steps_after(1)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.jsonl"]


def test_rows_recorded_without_an_environment_are_read_as_one_turn(tmp_path: Path):
    RolloutLog(tmp_path).write_samples(4, [OLD_ROW])
    (group,) = read_recorded_groups(tmp_path, 4)
    assert (group.step, group.uid, group.ground_truth, group.mean_score) == (4, "0:1:0", "2", 0.5)
    first = group.rollouts[0]
    assert first.components == {"rule": 1.0, "judge": None}
    assert first.prompt_text is first.version_range is first.finish_reason is None
    (turn,) = first.visible_turns
    assert (turn.source, turn.text, turn.tokens) == ("sampled", "2", None)


def test_steps_are_listed_by_number_and_foreign_files_ignored(tmp_path: Path):
    assert list_recorded_steps(tmp_path) == []
    for step in (1_000_000, 3, 12):
        RolloutLog(tmp_path).write_samples(step, [OLD_ROW])
    (tmp_path / "rollouts" / "step_mine.jsonl").touch()
    assert list_recorded_steps(tmp_path) == [3, 12, 1_000_000]
    assert read_recorded_groups(tmp_path, 4) == []


def test_a_lone_surrogate_in_a_prompt_is_written_and_read(tmp_path: Path):
    RolloutLog(tmp_path).write_samples(1, [{**OLD_ROW, "ground_truth": "\ud800 ä"}])
    assert read_recorded_groups(tmp_path, 1)[0].ground_truth == "\ud800 ä"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"uid": "0:1:0"}, "Object missing required field `rollouts`"),
        ({**OLD_ROW, "rollouts": [{"completion": 3, "score": 1}]}, "Expected `str`, got `int`"),
        ([], "Expected `object`"),
    ],
)
def test_a_row_that_is_not_a_group_is_an_error_with_its_line(
    row: Any, problem: str, tmp_path: Path
):
    RolloutLog(tmp_path).write_samples(2, [OLD_ROW, row])
    with pytest.raises(ConfigError, match=r"step_000002.jsonl:2: not a recorded group: ") as error:
        read_recorded_groups(tmp_path, 2)
    assert problem in str(error.value)
