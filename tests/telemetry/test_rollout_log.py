"""Rollout log: one file per step; later steps are removed on resume."""

import errno
import json
import os
from pathlib import Path

import pytest

from streamrl.errors import DiskError
from streamrl.telemetry.rollout_log import RolloutLog


def test_a_step_with_samples_has_a_file_of_them(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.write_samples(1, [])
    assert not (tmp_path / "rollouts").exists()
    log.write_samples(2, [{"prompt": "1+1", "score": 1.0}, {"prompt": "ä", "score": 0.0}])
    lines = (tmp_path / "rollouts" / "step_000002.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["1+1", "ä"]


def test_a_full_disk_raises_an_error_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskError, match=r"step_000002.jsonl cannot be written: No space left"):
        RolloutLog(tmp_path).write_samples(2, [{"score": 1.0}])


def test_resuming_removes_the_samples_of_later_steps(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    for step in (1, 2, 3):
        log.write_samples(step, [{"step": step}])
    RolloutLog(tmp_path).discard_steps_after(1)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.jsonl"]
