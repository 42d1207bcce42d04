"""Checkpoints: atomic writes, resume points, and the state that a resume discards."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer.durable_shard import SnapshotBase
from streamrl.buffer.journal import get_segment_path, list_segments
from streamrl.dataflow import POLICY
from streamrl.errors import ConfigError, NoSpaceError
from streamrl.files.file_proofs import prove_files
from streamrl.run_dir import checkpoint
from streamrl.run_dir.checkpoint import (
    CHECKPOINT_FORMAT,
    RUN_LOG_FOLDER,
    Checkpoint,
    CheckpointState,
    CheckpointWriter,
    QueueLayout,
    ResumePoint,
    check_files,
    find_next_generation,
    find_resume_point,
    find_snapshot,
    get_journal_dir,
    get_role_dirs,
    link_checkpoint,
    list_checkpoints,
    read_checkpoint,
    read_layout,
    remove_old_shards,
    write_state,
)
from streamrl.run_dir.discarded import DISCARDED, forget_discarded, restore_discarded


def state(version: int, cuts: Mapping[str, int]) -> CheckpointState:
    return CheckpointState(version=version, ledger={}, prompts={}, dials={}, cuts=cuts)


def write(
    run_dir: Path,
    version: int,
    *,
    keep: int = 10,
    evaluation: tuple[float, int] | None = None,
    **cuts: int,
) -> Path:
    writer = CheckpointWriter(run_dir, version)
    for folder in (get_role_dirs(writer.partial_dir, POLICY)[0], writer.queue_dir):
        folder.mkdir()
    (get_role_dirs(writer.partial_dir, POLICY)[0] / "weights").write_text(str(version))
    shard_cuts = {name.replace("_", "-"): cut for name, cut in cuts.items()}
    contents = state(version, shard_cuts)
    if evaluation is not None:
        contents["evaluation"] = dict(zip(("mean", "settings"), evaluation, strict=True))
    return writer.commit(contents, keep=keep)


def write_segments(run_dir: Path, owner: str, *numbers: int) -> None:
    get_journal_dir(run_dir, owner).mkdir(parents=True)
    for number in numbers:
        get_segment_path(get_journal_dir(run_dir, owner), number).touch()


def find_newest(run_dir: Path) -> Checkpoint:
    checkpoint = find_resume_point(run_dir).checkpoint
    assert checkpoint is not None
    return checkpoint


# Writing.


def list_kept(run_dir: Path) -> list[int]:
    return [read_checkpoint(path).version for path in list_checkpoints(run_dir / "checkpoints")]


def test_the_best_checkpoint_by_evaluation_is_kept_and_linked(tmp_path: Path):
    best = tmp_path / "checkpoints" / "best"
    write(tmp_path, 1, keep=1)
    assert not best.is_symlink(), "no evaluation, no best"
    for version, score in ((2, 0.5), (3, 0.9), (4, 0.7)):
        write(tmp_path, version, keep=1, evaluation=(score, 7))
    write(tmp_path, 5, keep=1)
    assert list_kept(tmp_path) == [3, 5] and best.resolve().name == "step_000003"
    assert find_newest(tmp_path).version == 5
    named = find_resume_point(best)
    assert (named.run_dir, named.version) == (tmp_path, 3), "the link can be resumed, too"
    write(tmp_path, 6, keep=1, evaluation=(0.9, 7))
    assert list_kept(tmp_path) == [6] and best.resolve().name == "step_000006", "newer of equals"


def test_evaluations_under_other_settings_are_not_compared(tmp_path: Path):
    write(tmp_path, 1, evaluation=(0.9, 7))
    write(tmp_path, 2, evaluation=(0.2, 8))
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_000002"


def test_going_back_before_the_best_checkpoint_links_another(tmp_path: Path):
    for version, score in ((1, 0.3), (2, 0.5), (3, 0.9)):
        write(tmp_path, version, evaluation=(score, 7))
    find_resume_point(tmp_path / "checkpoints" / "step_000002").discard_later()
    assert list_kept(tmp_path) == [1, 2]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_000002"


def test_a_repeated_save_replaces_the_checkpoint(tmp_path: Path):
    write(tmp_path, 3)
    write(tmp_path, 3)
    assert find_newest(tmp_path).version == 3


def test_the_proof_of_the_process_that_wrote_a_file_finds_later_damage(tmp_path: Path):
    writer = CheckpointWriter(tmp_path, 5)
    weights = get_role_dirs(writer.partial_dir, POLICY)[0] / "weights"
    weights.parent.mkdir()
    weights.write_text("5")
    writer.add_proofs(prove_files([weights]))
    weights.write_text("6")  # before the commit
    writer.commit(state(5, {}), keep=1)
    with pytest.raises(ConfigError, match="model/weights has changed since it was written"):
        check_files(find_newest(tmp_path))


def test_a_disk_error_names_the_checkpoint_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, 5)
    writer = CheckpointWriter(tmp_path, 10)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(NoSpaceError, match=r"step_000010 cannot be written: No space left"):
        writer.commit(state(10, {}), keep=1)
    monkeypatch.undo()
    writer.discard()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000005"]
    assert find_newest(tmp_path).version == 5


# Resume points.


def test_resume_uses_the_newest_checkpoint_and_its_journal(tmp_path: Path):
    paths = {version: write(tmp_path, version) for version in (5, 100, 20)}
    assert not find_resume_point(paths[20]).should_keep_journal
    point = find_resume_point(tmp_path)
    assert find_resume_point(paths[100]) == point
    assert point.checkpoint is not None
    assert (point.run_dir, point.version, point.should_keep_journal) == (tmp_path, 100, True)
    assert (point.checkpoint.model_dir / "weights").read_text() == "100"
    assert get_role_dirs(point.checkpoint.path, POLICY)[1] == point.checkpoint.path / "trainer"


def test_resume_without_a_checkpoint_starts_at_version_0_with_the_journal(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("")
    assert find_resume_point(tmp_path) == ResumePoint(tmp_path, None), "died before its first step"
    (tmp_path / "metrics.jsonl").write_text("")
    assert find_resume_point(tmp_path) == ResumePoint(tmp_path, None)
    write_segments(tmp_path, RUN_LOG_FOLDER, 1)
    assert find_resume_point(tmp_path).version == 0
    CheckpointWriter(tmp_path, 1)
    assert find_resume_point(tmp_path).version == 0, "a partial checkpoint does not count"


@pytest.mark.parametrize(
    ("lacks", "rule"),
    [
        ("config.yaml", "not a run directory: holds no config.yaml"),
        ("journal", "cannot be resumed: it has trained steps, but no checkpoint and no journal"),
    ],
)
def test_resume_refuses_a_directory_without_a_run(tmp_path: Path, lacks: str, rule: str):
    if lacks != "config.yaml":
        (tmp_path / "config.yaml").write_text("")
    if lacks != "journal":
        write_segments(tmp_path, RUN_LOG_FOLDER, 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=rule):
        find_resume_point(tmp_path)


def test_invalid_checkpoints_are_refused_with_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such directory"):
        find_resume_point(tmp_path / "nowhere")
    full_state = {**state(1, {}), "files": {}}
    for name in full_state:
        write_state(tmp_path, {key: full_state[key] for key in full_state if key != name})
        with pytest.raises(ConfigError, match=f"state.json: .*`{name}`"):
            find_resume_point(tmp_path)
    write_state(tmp_path, full_state)
    assert read_checkpoint(tmp_path).version == 1


# State that a resume discards.


def run_with_two_checkpoints(run_dir: Path) -> None:
    """Write checkpoints 5 and 10; segments before the newest cut are already discarded."""
    write_segments(run_dir, "shard-0", 5, 6)
    write_segments(run_dir, RUN_LOG_FOLDER, 1, 2, 3, 4)
    write(run_dir, 5, shard_0=3, books=2)
    write(run_dir, 10, shard_0=5, books=4)


def list_contents(run_dir: Path) -> tuple[list[str], list[int], list[int]]:
    names = [path.name for path in list_checkpoints(run_dir / "checkpoints")]
    return (
        names,
        list_segments(get_journal_dir(run_dir, "shard-0")),
        list_segments(get_journal_dir(run_dir, RUN_LOG_FOLDER)),
    )


def test_what_a_resume_discards_can_be_restored_until_its_first_new_step(tmp_path: Path):
    run_with_two_checkpoints(tmp_path)
    QueueLayout(1).write(tmp_path)
    before, older = list_contents(tmp_path), tmp_path / "checkpoints" / "step_000005"
    find_resume_point(older).discard_later()
    write_segments(tmp_path, "shard-1", 1)
    restore_discarded(tmp_path)
    restore_discarded(tmp_path)
    assert list_contents(tmp_path) == before and find_resume_point(tmp_path).version == 10
    assert not get_journal_dir(tmp_path, "shard-1").exists()
    find_resume_point(older).discard_later()
    forget_discarded(tmp_path)
    restore_discarded(tmp_path)
    assert list_contents(tmp_path) == (["step_000005"], [], [1])
    assert find_resume_point(tmp_path).version == 5
    assert find_snapshot(tmp_path, "shard-0").first_segment == 3


@pytest.mark.parametrize("removed", range(5))
def test_a_crash_while_forgetting_leaves_nothing_to_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
):
    run_with_two_checkpoints(tmp_path)
    QueueLayout(1).write(tmp_path)
    find_resume_point(tmp_path / "checkpoints" / "step_000005").discard_later()
    unlink, files = os.unlink, iter(range(removed))

    def crash(*arguments: Any, **options: Any) -> None:
        if next(files, None) is None:
            raise KeyboardInterrupt
        unlink(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", crash)
        forget_discarded(tmp_path)
    assert list_contents(tmp_path) == (["step_000005"], [], [1])
    assert not (tmp_path / DISCARDED).exists()
    find_resume_point(tmp_path).discard_later()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "journal"]


@pytest.mark.parametrize("version", [10, 15])
def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path: Path, version: int):
    run_with_two_checkpoints(tmp_path)
    before = list_contents(tmp_path)
    for _ in range(2):  # the second save removes what the first left
        get_role_dirs(CheckpointWriter(tmp_path, version).partial_dir, POLICY)[0].mkdir()
    assert find_resume_point(tmp_path).version == 10
    find_resume_point(tmp_path).discard_later()
    assert list_contents(tmp_path) == before
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_000005", "step_000010"}


def test_a_crash_while_discarding_leaves_only_consistent_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_with_two_checkpoints(tmp_path)
    older = tmp_path / "checkpoints" / "step_000005"

    def crash(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        find_resume_point(older).discard_later()
    monkeypatch.undo()
    # If the newer checkpoint went first, the older would adopt the remaining journals.
    assert list_contents(tmp_path) == (["step_000005", "step_000010"], [], [1])
    find_resume_point(older).discard_later()
    assert list_contents(tmp_path) == (["step_000005"], [], [1])


def test_resume_from_an_older_checkpoint_drops_journals_of_a_lost_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_with_two_checkpoints(tmp_path)
    older, lost = (tmp_path / "checkpoints" / f"step_0000{n}" for n in ("05", "10"))
    assert find_resume_point(older).has_contiguous_journal is False
    (lost / "state.json").unlink()
    point = find_resume_point(tmp_path)
    assert (point.version, point.should_keep_journal, point.has_contiguous_journal) == (
        5,
        True,
        False,
    )
    # Even after an interrupted discard, the older checkpoint does not adopt the journals.
    delete_segments, deleted = checkpoint.delete_segments_from, list[str]()

    def crash(journal: Path, first: int) -> None:
        if len(deleted) == 1:
            raise KeyboardInterrupt
        deleted.append(journal.name)
        delete_segments(journal, first)

    monkeypatch.setattr(checkpoint, "delete_segments_from", crash)
    with pytest.raises(KeyboardInterrupt):
        find_resume_point(older).discard_later()
    monkeypatch.undo()
    assert deleted == [RUN_LOG_FOLDER] and not find_resume_point(older).should_keep_journal
    find_resume_point(older).discard_later()
    assert list_contents(tmp_path) == (["step_000005"], [], [1])
    assert not lost.exists()
    assert find_resume_point(tmp_path).has_contiguous_journal


def test_a_shard_continues_its_snapshot_in_the_newest_checkpoint(tmp_path: Path):
    assert find_snapshot(tmp_path, "shard-0") == SnapshotBase()
    write(tmp_path, 5, shard_0=3, shard_1=8)
    last = write(tmp_path, 10, shard_0=5, shard_1=9)
    assert find_snapshot(tmp_path, "shard-1") == SnapshotBase(last / "queue" / "shard-1", 9)


# Validation.


def test_a_missing_or_truncated_file_is_named(tmp_path: Path):
    path = write(tmp_path, 5)
    check_files(find_newest(tmp_path))
    weights = path / "model" / "weights"
    weights.write_text("55")
    with pytest.raises(ConfigError, match="model/weights has 2 bytes of 1"):
        check_files(find_newest(tmp_path))
    weights.unlink()
    with pytest.raises(ConfigError, match="model/weights is missing"):
        check_files(find_newest(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, f"not a checkpoint of format {CHECKPOINT_FORMAT}"),
        ({"cuts": {"../../elsewhere": 1}}, r"at `key` in `\$.cuts`"),
        ({"cuts": {"shard-0": -1}}, r">= 0 - at `\$.cuts"),
        ({"ledger": 3}, r"got `int` - at `\$.ledger`"),
    ],
)
def test_invalid_values_in_state_json_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    path = write(tmp_path, 5)
    fields = json.loads((path / "state.json").read_text())
    write_state(path, {key: fields[key] for key in fields if key != "hash"} | changes)
    with pytest.raises(ConfigError, match=message):
        find_newest(tmp_path)


def test_a_linked_checkpoint_survives_removal_of_the_original(tmp_path: Path):
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    path = write(tmp_path / "run", 5, shard_0=3, books=2)
    linked = link_checkpoint(find_newest(tmp_path / "run"), tmp_path / "other")
    assert linked.state == find_newest(tmp_path / "run").state
    shutil.rmtree(path)
    assert (find_newest(tmp_path / "other").model_dir / "weights").read_text() == "5"


# Layout of the shards' folders.


def test_the_layout_file_sets_the_shard_folders(tmp_path: Path):
    assert read_layout(tmp_path, shards=2).shard_names == ["shard-0", "shard-1"]
    assert find_next_generation(tmp_path) == 1
    run_with_two_checkpoints(tmp_path)
    layout = QueueLayout(3, find_next_generation(tmp_path))
    for name in layout.shard_names:
        write_segments(tmp_path, name, 1)
    assert read_layout(tmp_path, shards=1).shard_names == ["shard-0"], (
        "the new layout holds once its file is written"
    )
    layout.write(tmp_path)
    assert read_layout(tmp_path, shards=1).shard_names == ["shard-0.1", "shard-1.1", "shard-2.1"]
    assert find_snapshot(tmp_path, "shard-1.1") == SnapshotBase(), "the journal is complete"
    assert find_next_generation(tmp_path) == 2
    remove_old_shards(tmp_path, layout)
    kept = sorted(path.name for path in (tmp_path / "journal").iterdir() if path.is_dir())
    assert kept == ["books", "shard-0.1", "shard-1.1", "shard-2.1"]
    older = find_resume_point(tmp_path / "checkpoints" / "step_000005")
    assert older.read_layout(shards=9).shard_names == ["shard-0"], "the layout of its snapshots"
    older.discard_later()
    assert read_layout(tmp_path, shards=9).shard_names == ["shard-0"]


@pytest.mark.parametrize("text", ["{}", "[", '{"shards": 0, "generation": 1}', '{"shards": "2"}'])
def test_a_malformed_layout_file_is_refused(tmp_path: Path, text: str):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "layout.json").write_text(text)
    with pytest.raises(ConfigError, match=r"layout\.json: "):
        read_layout(tmp_path, shards=1)
