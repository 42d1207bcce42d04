"""Checkpoints on disk: whole or not there. The newest complete one is where a run resumes.

<run>/checkpoints/step_000020/model/       Hugging Face directory
                              trainer/     parameters, optimizer and RNG, for any number of ranks
                              critic/      the same two of the critic, where there is one
                              queue/       the groups in flight, a folder per shard
                              state.json   version, ledger, data position, cuts of the journals,
                                           and the size of every file
<run>/journal/                             a folder per shard, and the books: what came since
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from streamrl.buffer.log.segment_file import check_first_segment
from streamrl.buffer.recovery import SnapshotBase
from streamrl.buffer.shard_host import delete_segments_from
from streamrl.dataflow import POLICY
from streamrl.errors import CheckpointError, ConfigError, JournalError
from streamrl.files.atomic_write import sync_and_rename, wrap_checkpoint_errors, write_atomic
from streamrl.files.bounded_read import MIB, read_small_json
from streamrl.files.typed_settings import describe_read_error
from streamrl.telemetry.sinks import METRICS_FILE

CHECKPOINT_FORMAT = 3
MAX_STATE_BYTES = 1024 * MIB
"""Of state.json, which with run.debug has the uid of every prompt there ever was."""
RUN_LOG_FOLDER = "books"
LAYOUT_FILE = "layout.json"
_STEP_FOLDER_PATTERN = re.compile(r"step_(\d{6,})")
_SHARD_FOLDER_PATTERN = re.compile(r"shard-(\d{1,6})(?:\.(\d{1,6}))?")


class CheckpointState(TypedDict):
    """What state.json of a checkpoint has beside its format, and the sizes of its files."""

    version: int
    ledger: Mapping[str, Any]
    prompts: Mapping[str, Any]
    dials: Mapping[str, float]
    cuts: Mapping[str, int]


@dataclass
class CheckpointConfig:
    """When the run is saved.

    every: steps between checkpoints; 0 saves at the end only.
    keep: newest checkpoints kept.
    at_end: save when the run ends.
    """

    every: int = 0
    keep: int = 2
    at_end: bool = True

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"checkpoint.every={self.every}: must be 0 or more steps")
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep={self.keep}: must be at least 1")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory."""

    path: Path
    state: CheckpointState

    @property
    def version(self) -> int:
        """The policy_version it holds."""
        return self.state["version"]

    @property
    def model_dir(self) -> Path:
        """The policy as a Hugging Face directory."""
        return self.get_role_dirs(POLICY)[0]

    def get_role_dirs(self, role: str) -> tuple[Path, Path]:
        """A trained model as a Hugging Face directory, and its ranks' training state."""
        return get_role_dirs(self.path, role)


def get_role_dirs(path: Path, role: str) -> tuple[Path, Path]:
    """Where a checkpoint has the model of a role, and the state of its trainer."""
    folder = path if role == POLICY else path / role
    return folder / "model", folder / "trainer"


class CheckpointWriter:
    """Writes the checkpoint of one version: fill `get_role_dirs` of every role, then `commit`."""

    def __init__(self, run_dir: Path, version: int) -> None:
        self._final_dir = run_dir / "checkpoints" / f"step_{version:06d}"
        self._partial_dir = self._final_dir.with_name(f".{self._final_dir.name}.partial")
        self.queue_dir = self._partial_dir / "queue"
        self.discard()
        with wrap_checkpoint_errors(self._final_dir):
            self._partial_dir.mkdir(parents=True)

    def rename_in_error(self, error: CheckpointError) -> CheckpointError:
        """The error that names the checkpoint, not what it is called until it is whole."""
        return type(error)(str(error).replace(str(self._partial_dir), str(self._final_dir)))

    def discard(self) -> None:
        """Remove what was written so far, as on a disk that is full."""
        shutil.rmtree(self._partial_dir, ignore_errors=True)

    def get_role_dirs(self, role: str) -> tuple[Path, Path]:
        """Where the model of a role goes, and the state of its trainer."""
        return get_role_dirs(self._partial_dir, role)

    def commit(self, state: CheckpointState, *, keep: int) -> Path:
        """Make the checkpoint visible in one rename, then remove all but the newest `keep`.

        Raises NoSpaceError, or CheckpointError, if the disk refuses; what was there before stays.
        """
        replaced = self._final_dir.with_name(f".{self._final_dir.name}.replaced")
        with wrap_checkpoint_errors(self._final_dir):
            text = json.dumps(
                {"format": CHECKPOINT_FORMAT, **state, "files": _measure_files(self._partial_dir)},
                indent=1,
            )
            (self._partial_dir / "state.json").write_text(text + "\n")
            if self._final_dir.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                self._final_dir.rename(replaced)
            sync_and_rename(self._partial_dir, self._final_dir)
            shutil.rmtree(replaced, ignore_errors=True)
        for old in list_checkpoints(self._final_dir.parent)[:-keep]:
            shutil.rmtree(old)
        return self._final_dir


def _measure_files(folder: Path) -> dict[str, int]:
    """Bytes of every file in a folder, by its path in there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoint directories in `folder`, oldest first."""
    return [path for path in _list_step_folders(folder) if (path / "state.json").is_file()]


def _list_step_folders(folder: Path) -> list[Path]:
    """What is called as checkpoints are, also if it has lost its state, oldest first."""
    found = [path for path in folder.glob("step_*") if _STEP_FOLDER_PATTERN.fullmatch(path.name)]
    return sorted(found, key=_parse_step)


def _parse_step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a directory. Raises ConfigError for one that cannot be used."""
    place = f"--resume {folder}/state.json"
    try:
        state = read_small_json(folder / "state.json", most_bytes=MAX_STATE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: {describe_read_error(error)}") from None
    if not isinstance(state, dict) or state.get("format") != CHECKPOINT_FORMAT:
        raise ConfigError(f"{place}: not a checkpoint of format {CHECKPOINT_FORMAT}")
    lacks = sorted(CheckpointState.__required_keys__ - state.keys())
    if lacks:
        raise ConfigError(f"{place}: lacks {', '.join(lacks)}")
    if problem := _find_version_problem(state["version"], folder):
        raise ConfigError(f"{place}: version {state['version']!r}: {problem}")
    for key in ("ledger", "prompts", "dials", "cuts", "files"):
        if not isinstance(state.get(key, {}), dict):
            raise ConfigError(f"{place}: {key}: must be a mapping")
    for key in ("cuts", "files"):
        if not all(map(_is_count, state.get(key, {}).values())):
            raise ConfigError(f"{place}: {key}: must be whole numbers")
    if not all(
        name == RUN_LOG_FOLDER or _SHARD_FOLDER_PATTERN.fullmatch(name) for name in state["cuts"]
    ):
        raise ConfigError(f"{place}: cuts: must be of shards and {RUN_LOG_FOLDER}")
    return Checkpoint(folder, cast(CheckpointState, state))


def _find_version_problem(version: object, folder: Path) -> str:
    if not _is_count(version):
        return "no integer"
    is_other = _STEP_FOLDER_PATTERN.fullmatch(folder.name) and _parse_step(folder) != version
    return "in a folder of another's name" if is_other else ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_files(checkpoint: Checkpoint) -> None:
    """Raise ConfigError unless every file is there as large as it was written.

    Checkpoints did not always tell.
    """
    sizes: Mapping[str, int] = cast(Mapping[str, Any], checkpoint.state).get("files", {})
    for name, size in sizes.items():
        path = checkpoint.path / name
        have = path.stat().st_size if path.is_file() else None
        if have != size:
            found = "is missing" if have is None else f"has {have} bytes of {size}"
            raise ConfigError(f"--resume {checkpoint.path}: {name} {found}")


@dataclass(frozen=True)
class QueueLayout:
    """The folders of a run's shards. Their number changes with a new `generation` of folders."""

    shards: int
    generation: int = 0

    @property
    def shard_names(self) -> list[str]:
        """The folder of each shard, in the journal and in the snapshots of checkpoints."""
        suffix = f".{self.generation}" if self.generation else ""
        return [f"shard-{i}{suffix}" for i in range(self.shards)]

    def write(self, run_dir: Path) -> None:
        """Have the run go on with these folders; all or nothing."""
        write_atomic(run_dir / "journal" / LAYOUT_FILE, json.dumps(vars(self)) + "\n")


def read_layout(run_dir: Path, *, shards: int) -> QueueLayout:
    """The folders a run goes on with; `shards` is what its config says, where nothing else does.

    Raises ConfigError for a file that says nothing.
    """
    path = run_dir / "journal" / LAYOUT_FILE
    if not path.exists():
        return QueueLayout(shards)
    try:
        found = read_small_json(path)
        layout = QueueLayout(found["shards"], found["generation"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: {error!r}: cannot be read") from None
    if not (_is_count(layout.shards) and layout.shards and _is_count(layout.generation)):
        raise ConfigError(f"{path}: shards and generation must be whole numbers")
    return layout


def _get_snapshot_layout(checkpoint: Checkpoint, *, shards: int) -> QueueLayout:
    """The folders of a checkpoint's snapshots."""
    found = [
        _SHARD_FOLDER_PATTERN.fullmatch(name)
        for name in checkpoint.state["cuts"]
        if name != RUN_LOG_FOLDER
    ]
    generations = {int(match[2] or 0) for match in found if match}
    if not generations:
        return QueueLayout(shards)
    layout = QueueLayout(len(found), max(generations))
    if {*layout.shard_names} != checkpoint.state["cuts"].keys() - {RUN_LOG_FOLDER}:
        raise ConfigError(f"--resume {checkpoint.path}/state.json: cuts: shards are missing")
    return layout


def find_next_generation(run_dir: Path) -> int:
    """A number that no folder of a shard has had, as far as is known."""
    names = [path.name for path in (run_dir / "journal").glob("shard-*")]
    for folder in list_checkpoints(run_dir / "checkpoints"):
        names += read_checkpoint(folder).state["cuts"]
    found = [match for name in names if (match := _SHARD_FOLDER_PATTERN.fullmatch(name))]
    return 1 + max((int(match[2] or 0) for match in found), default=0)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: at a checkpoint, or at its very start if it died before its first.

    `should_keep_journal` says whether what came after the checkpoint is part of it; not so for a
    checkpoint that is named itself, if there are newer ones, or if one has been that is lost: the
    journals continue that one.
    """

    run_dir: Path
    checkpoint: Checkpoint | None
    should_keep_journal: bool = True

    @property
    def version(self) -> int:
        """The policy_version it goes on from."""
        return self.checkpoint.version if self.checkpoint else 0

    def read_layout(self, *, shards: int) -> QueueLayout:
        """The folders that the shards' groups are in; `shards` as in `read_layout`."""
        if self.checkpoint is not None and not self.should_keep_journal:
            return _get_snapshot_layout(self.checkpoint, shards=shards)
        return read_layout(self.run_dir, shards=shards)

    @property
    def has_contiguous_journal(self) -> bool:
        """Whether the journals begin where its checkpoint ends, or before."""
        return self.checkpoint is None or not _find_journal_gaps(self.run_dir, self.checkpoint)

    def find_snapshot(self, name: str) -> SnapshotBase:
        """The snapshot of a shard's folder that its journal continues from here."""
        return (
            SnapshotBase() if self.checkpoint is None else _find_snapshot_in(self.checkpoint, name)
        )

    def discard_later(self) -> None:
        """Remove what lies behind this point: the run goes on from here another way."""
        folder = self.run_dir / "checkpoints"
        for partial in folder.glob(".step_*.partial"):
            shutil.rmtree(partial)
        for replaced in folder.glob(".step_*.replaced"):
            final = folder / replaced.name[1:].removesuffix(".replaced")
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)
        if self.checkpoint is None or self.should_keep_journal:
            return
        cuts = self.checkpoint.state["cuts"]
        # The journals first: cut off in between, the newer checkpoints still stand for themselves.
        # Where these are lost, what cannot be continued goes last: as long as it is there, nobody
        # takes the rest for what continues this one.
        gaps = _find_journal_gaps(self.run_dir, self.checkpoint)
        for name in sorted(cuts, key=lambda name: name in gaps):
            delete_segments_from(get_journal_dir(self.run_dir, name), cuts[name])
        layout = _get_snapshot_layout(self.checkpoint, shards=0)
        if layout.shards:
            layout.write(self.run_dir)
        for path in reversed(_list_step_folders(folder)):
            if _parse_step(path) > self.version:
                shutil.rmtree(path)


def find_run_dir(path: Path) -> Path:
    """The run directory of a path that is one, or a checkpoint of one; raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"--resume {path}: no such directory")
    folder = path.resolve()
    return folder.parent.parent if (folder / "state.json").is_file() else folder


def find_resume_point(path: Path) -> ResumePoint:
    """Where to go on: the newest checkpoint of a run directory, its start, or the one named.

    Raises ConfigError if there is nothing to go on from.
    """
    run_dir, folder = find_run_dir(path), path.resolve()
    if run_dir != folder:
        named = ResumePoint(run_dir, read_checkpoint(folder))
        is_newest = list_checkpoints(folder.parent)[-1:] == [folder]
        return replace(named, should_keep_journal=is_newest and named.has_contiguous_journal)
    complete = list_checkpoints(folder / "checkpoints")
    if complete:
        return ResumePoint(folder, read_checkpoint(complete[-1]))
    metrics = folder / METRICS_FILE
    # A run that died before its first step has no books yet, and nothing that they would tell.
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    is_told = get_journal_dir(folder, RUN_LOG_FOLDER).is_dir() or not has_steps
    if not (folder / "config.yaml").is_file() or not is_told:
        raise ConfigError(
            f"--resume {path}: not a checkpoint, nor a run directory that holds one or a journal"
        )
    return ResumePoint(folder, None)


def get_journal_dir(run_dir: Path, owner: str) -> Path:
    """Where a shard (shard-<i>) or the coordinator (books) keeps its journal."""
    return run_dir / "journal" / owner


def find_snapshot(run_dir: Path, shard: str) -> SnapshotBase:
    """The snapshot of a shard in the newest complete checkpoint, and the cut it was made at.

    None of a folder that is younger than the checkpoint: its journal has all.
    """
    complete = list_checkpoints(run_dir / "checkpoints")
    return _find_snapshot_in(read_checkpoint(complete[-1]), shard) if complete else SnapshotBase()


def _find_snapshot_in(checkpoint: Checkpoint, shard: str) -> SnapshotBase:
    cut = checkpoint.state["cuts"].get(shard)
    return SnapshotBase() if cut is None else SnapshotBase(checkpoint.path / "queue" / shard, cut)


def _find_journal_gaps(run_dir: Path, checkpoint: Checkpoint) -> set[str]:
    """The journals of a run that lack what came right after a checkpoint."""
    cuts = checkpoint.state["cuts"]
    if not cuts:
        return set()
    layout = read_layout(run_dir, shards=_get_snapshot_layout(checkpoint, shards=0).shards)
    gaps = set()
    for name in (*layout.shard_names, *cuts):
        try:
            check_first_segment(get_journal_dir(run_dir, name), cuts.get(name, 0))
        except JournalError:
            gaps.add(name)
    return gaps


def remove_old_shards(run_dir: Path, layout: QueueLayout) -> None:
    """Remove journals of folders that the run has left, once no checkpoint continues them."""
    for path in (run_dir / "journal").glob("shard-*"):
        if path.name not in layout.shard_names and _SHARD_FOLDER_PATTERN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def link_checkpoint(checkpoint: Checkpoint, run_dir: Path) -> Checkpoint:
    """Have a checkpoint in another run directory, too: its files are linked, or copied.

    The files of a checkpoint never change. Raises OSError if there is no room.
    """
    target = run_dir / "checkpoints" / checkpoint.path.name
    shutil.copytree(checkpoint.path, target, copy_function=_link_or_copy)
    return read_checkpoint(target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=True)
    except OSError:
        # Another file system, or one without links.
        shutil.copy2(source, target)
