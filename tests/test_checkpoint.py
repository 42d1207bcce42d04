"""Checkpoints: whole or not there."""

import json
from pathlib import Path

import pytest

from streamrl.checkpoint import (
    CheckpointConfig,
    CheckpointWriter,
    discard_later,
    find_checkpoint,
    list_checkpoints,
    run_dir_of,
)
from streamrl.errors import ConfigError


def write(run_dir: Path, version: int, keep: int = 10) -> Path:
    writer = CheckpointWriter(run_dir, version)
    writer.model_dir.mkdir()
    (writer.model_dir / "weights").write_text(str(version))
    return writer.commit({"version": version, "ledger": {}, "prompts": {}}, keep=keep)


def test_the_newest_checkpoint_of_a_run_is_found(tmp_path: Path) -> None:
    for version in (5, 100, 20):
        write(tmp_path, version)
    found = find_checkpoint(tmp_path)
    assert found.version == 100
    assert (found.model_dir / "weights").read_text() == "100"
    assert run_dir_of(found) == tmp_path


def test_one_checkpoint_can_be_named(tmp_path: Path) -> None:
    first = write(tmp_path, 5)
    write(tmp_path, 10)
    assert find_checkpoint(first).version == 5


def test_one_that_was_cut_off_half_way_is_not_seen(tmp_path: Path) -> None:
    write(tmp_path, 5)
    writer = CheckpointWriter(tmp_path, 10)
    writer.model_dir.mkdir()
    assert find_checkpoint(tmp_path).version == 5
    write(tmp_path, 10)
    assert find_checkpoint(tmp_path).version == 10, "a second try starts from nothing"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        write(tmp_path, version, keep=2)
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step_000003", "step_000004"]


def test_writing_a_version_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 3)
    assert find_checkpoint(tmp_path).version == 3


def test_going_on_from_an_older_one_discards_what_came_later(tmp_path: Path) -> None:
    older = write(tmp_path, 5)
    write(tmp_path, 10)
    discard_later(find_checkpoint(older))
    assert find_checkpoint(tmp_path).version == 5


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a checkpoint, nor a run directory"):
        find_checkpoint(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json"):
        find_checkpoint(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ConfigError, match="not a checkpoint of format 1"):
        find_checkpoint(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ConfigError, match="lacks version"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("every", -1), ("keep", 0)])
def test_impossible_settings_are_refused(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}={value}"):
        CheckpointConfig(**{key: value})
