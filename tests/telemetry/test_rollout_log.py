"""Recorded rollouts: written, thinned out, read, and discarded on resume."""

import errno
import math
import os
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import ConfigError, DiskError
from streamrl.telemetry.rollout_log import (
    RecordedGroup,
    RecordedRollout,
    RolloutLog,
    groups_to_json,
    list_recorded_steps,
    read_recorded_groups,
)
from tests.telemetry.recorded import make_group, make_guess


def test_what_is_written_is_read(tmp_path: Path):
    rollouts = [make_guess("50", score=1.0), make_guess("25", score=0.0)]
    rollouts[0] = msgspec.structs.replace(
        rollouts[0],
        advantage=0.5,
        tokens=4,
        versions=(3, 4),
        verdicts={"env": "pass", "judge": "abstained"},
        numbers={"env": {"turns": 2.0}},
    )
    group = make_group(rollouts, environment="guess", ground_truth={"number": 77})
    RolloutLog(tmp_path).write_groups(4, [group])
    (read,) = read_recorded_groups(tmp_path, 4)
    assert msgspec.structs.replace(read, rollouts=()) == msgspec.structs.replace(group, rollouts=())
    assert read.rollouts[0] == msgspec.structs.replace(rollouts[0], numbers={})


def test_pandas_reads_all_steps_in_one_line(tmp_path: Path):
    log = RolloutLog(tmp_path)
    for step in (1, 2):
        rollouts = [RecordedRollout("a", score, advantage=score - 0.5) for score in (0.0, 1.0)]
        log.write_groups(step, [RecordedGroup(step, f"0:{step}:0", tuple(rollouts))])
    frame = pd.read_parquet(tmp_path / "rollouts")
    assert frame.groupby("step")["score"].mean().to_dict() == {1: 0.5, 2: 0.5}
    assert frame["advantage"].tolist() == [-0.5, 0.5] * 2
    assert frame["uid"].tolist() == ["0:1:0"] * 2 + ["0:2:0"] * 2


def test_groups_are_in_the_order_of_their_prompts(tmp_path: Path):
    groups = [RecordedGroup(1, uid, (RecordedRollout("", 0.0),)) for uid in ("0:10:0", "0:9:0")]
    RolloutLog(tmp_path).write_groups(1, groups)
    assert [group.uid for group in read_recorded_groups(tmp_path, 1)] == ["0:9:0", "0:10:0"]


def test_a_full_disk_is_an_error_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskError, match=r"step_000002.parquet cannot be written: No space left"):
        RolloutLog(tmp_path).write_groups(2, [make_group([make_guess("1", score=0.0)])])


def record_steps(log: RolloutLog, steps: range) -> None:
    for step in steps:
        log.write_groups(step, [make_group([make_guess("1", score=0.0)], step=step)])


def test_resume_removes_later_steps(tmp_path: Path):
    record_steps(RolloutLog(tmp_path), range(1, 4))
    RolloutLog(tmp_path).discard_steps_from(2)
    assert list_recorded_steps(tmp_path) == [1]


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_every_nth_step_is_recorded(tmp_path: Path, every: int, steps: list[int]):
    log = RolloutLog(tmp_path, every=every)
    record_steps(log, range(1, 7))
    log.write_groups(9, [])
    assert list_recorded_steps(tmp_path) == steps


@settings(max_examples=50)
@given(num_steps=st.integers(1, 40), size=st.floats(1.0, 12.0), resumed_at=st.integers(0, 40))
def test_the_folder_stays_small_and_covers_the_run(
    tmp_path_factory: pytest.TempPathFactory, num_steps: int, size: float, resumed_at: int
):
    folder = tmp_path_factory.mktemp("run")
    record_steps(RolloutLog(folder), range(1, 2))
    (file,) = (folder / "rollouts").iterdir()
    max_bytes = size * file.stat().st_size * 1.05
    last = max(num_steps, resumed_at)
    for steps in (range(2, resumed_at), range(max(resumed_at, 2), last + 1)):
        record_steps(RolloutLog(folder, max_bytes=max_bytes), steps)
    kept = list_recorded_steps(folder)
    assert 1 <= len(kept) <= max(1, math.floor(size * 1.1))
    # No part of the run lacks a recorded step for longer than the room asks for.
    gaps = [b - a for a, b in zip([0, *kept], [*kept, last], strict=True)]
    assert max(gaps) <= 4 * math.ceil(last / max(1.0, size)) + 1


def test_steps_are_listed_by_number_and_foreign_files_ignored(tmp_path: Path):
    assert list_recorded_steps(tmp_path) == []
    for step in (3, 12, 1_000_000):
        record_steps(RolloutLog(tmp_path), range(step, step + 1))
    (tmp_path / "rollouts" / "step_mine.parquet").touch()
    assert list_recorded_steps(tmp_path) == [3, 12, 1_000_000]
    assert read_recorded_groups(tmp_path, 4) == []


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path: Path):
    rollout = RecordedRollout("a \ud800", 0.0)
    RolloutLog(tmp_path).write_groups(1, [RecordedGroup(1, "0:1:0", (rollout,))])
    assert read_recorded_groups(tmp_path, 1)[0].rollouts[0].completion == "a \\ud800"


@pytest.mark.parametrize("columns", [None, ["step", "uid"], ["step", "uid", "turns", "score"]])
def test_a_damaged_file_is_named(columns: list[str] | None, tmp_path: Path):
    record_steps(RolloutLog(tmp_path), range(1, 2))
    path = tmp_path / "rollouts" / "step_000001.parquet"
    if columns is None:
        path.write_bytes(b"no parquet at all")
    else:
        pd.read_parquet(path)[columns].to_parquet(path)
    with pytest.raises(ConfigError, match=r"step_000001.parquet: ") as error:
        read_recorded_groups(tmp_path, 1)
    assert "\n" not in str(error.value)


def test_scores_are_also_relative_to_the_mean_of_their_group():
    (group,) = groups_to_json(
        [make_group([make_guess("50", score=1.0), make_guess("80", score=0.0)])]
    )["groups"]
    assert group["mean_score"] == 0.5
    assert [r["relative_score"] for r in group["rollouts"]] == [0.5, -0.5]
    turn = group["rollouts"][0]["turns"][1]
    assert turn["logprobs"] == (-0.5, None)


def test_scores_that_are_not_finite_are_null():
    group = RecordedGroup(1, "0:0:0", (RecordedRollout("", math.nan), RecordedRollout("", 1.0)))
    (described,) = groups_to_json([group])["groups"]
    assert described["mean_score"] is None
    assert [(r["score"], r["relative_score"]) for r in described["rollouts"]] == [
        (None, None),
        (1.0, None),
    ]
