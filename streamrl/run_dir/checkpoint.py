"""Checkpoints on disk, committed atomically. A run resumes from the newest complete checkpoint.

<run>/checkpoints/step_000020/model/       Hugging Face directory
                              trainer/     parameters, optimizer, RNG; loads on any number of ranks
                              critic/      the same two folders of the critic, if any
                              queue/       groups in flight, a folder per shard
                              state.json   version, ledger, data position, journal cuts,
                                           size and hash of every file, and a hash of itself
<run>/checkpoints/best                     link to the checkpoint of the best evaluation, if any
<run>/journal/                             records since then: a folder per shard, and the run log
"""

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta, ValidationError, convert

from streamrl.buffer.durable_shard import SnapshotBase
from streamrl.buffer.journal import check_first_segment, delete_segments_from
from streamrl.dataflow import POLICY
from streamrl.errors import CheckpointError, ConfigError, JournalError
from streamrl.files.atomic_write import (
    get_partial_path,
    sync_and_rename,
    wrap_checkpoint_errors,
    write_atomic,
)
from streamrl.files.bounded_read import (
    MIB,
    parse_json,
    read_small_json,
    read_small_text,
    wrap_file_errors,
)
from streamrl.files.file_proofs import (
    FileProof,
    compute_digest,
    find_changed_file,
    list_files,
    prove_files,
)
from streamrl.files.typed_settings import at_least
from streamrl.run_dir.discarded import DISCARDED, keep_links, link_or_copy
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.telemetry.sinks import METRICS_FILE

CHECKPOINT_FORMAT = 4
SIZES_ONLY_FORMAT = 3
"""Format of earlier versions, which recorded the sizes of files but no hashes."""
_NO_DIGEST = "0" * 16
"""Text in place of the hash of state.json while that hash is computed."""
MAX_STATE_BYTES = 1024 * MIB
"""Bound on the size of state.json."""
RUN_LOG_FOLDER = "books"
LAYOUT_FILE = "layout.json"
_STEP_FOLDER_PATTERN = re.compile(r"step_(\d{6,})")
_SHARD_FOLDER_PATTERN = re.compile(r"shard-(\d{1,6})(?:\.(\d{1,6}))?")
_Count = Annotated[int, Meta(ge=0)]
_JournalFolder = Annotated[
    str, Meta(pattern=f"^(?:{RUN_LOG_FOLDER}|{_SHARD_FOLDER_PATTERN.pattern})$")
]


class CheckpointState(TypedDict):
    """Contents of a checkpoint's state.json, apart from its format, its hash and the file proofs.

    cuts: first journal segment that the checkpoint does not cover, by shard folder or run log.
    evaluation: of this version, if there was one: `mean` score, and a hash of the `settings` that
        scores depend on. Scores under different settings are not compared.
    versions: of each trained role, in the checkpoint of an own loop.
    """

    version: _Count
    ledger: Mapping[str, Any]
    prompts: Mapping[str, Any]
    dials: Mapping[str, float]
    cuts: Mapping[_JournalFolder, _Count]
    evaluation: NotRequired[Mapping[str, int | float]]
    versions: NotRequired[Mapping[str, _Count]]


@dataclass
class CheckpointConfig:
    """Settings of the section `checkpoint`.

    every: steps between checkpoints; 0 writes only at the end.
    keep: number of newest checkpoints to keep, besides that of the best evaluation.
    at_end: write a checkpoint when the run ends.
    """

    every: Annotated[int, at_least(0)] = 0
    keep: Annotated[int, at_least(1)] = 2
    at_end: bool = True


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint on disk: its folder, the contents of its state.json, and its files.

    proofs: of every file, by path relative to the folder.
    """

    path: Path
    state: CheckpointState
    proofs: Mapping[str, FileProof] = field(default_factory=dict, compare=False)

    @property
    def version(self) -> int:
        return self.state["version"]

    @property
    def model_dir(self) -> Path:
        return get_role_dirs(self.path, POLICY)[0]


def get_role_dirs(path: Path, role: str) -> tuple[Path, Path]:
    """Return the folders of a role in a checkpoint: Hugging Face model, and trainer state.

    path: folder of the checkpoint.
    """
    folder = path if role == POLICY else path / role
    return folder / "model", folder / "trainer"


class CheckpointWriter:
    """Writes the checkpoint of a version into a hidden folder, which `commit` renames.

    Before `commit`, the trainers fill the folders of `get_role_dirs` and the shards fill queue_dir.
    Each process returns the proofs of the files it wrote, which `add_proofs` collects.
    """

    def __init__(self, run_dir: Path, version: int) -> None:
        self._final_dir = run_dir / "checkpoints" / f"step_{version:06d}"
        self.partial_dir = self._final_dir.with_name(f".{self._final_dir.name}.partial")
        self.queue_dir = self.partial_dir / "queue"
        self._proofs: dict[Path, FileProof] = {}
        self.discard()
        with wrap_checkpoint_errors(self._final_dir):
            self.partial_dir.mkdir(parents=True)

    def rename_in_error(self, error: CheckpointError) -> CheckpointError:
        """Return the error with the checkpoint's final folder in its text, not the hidden one."""
        return type(error)(str(error).replace(str(self.partial_dir), str(self._final_dir)))

    def discard(self) -> None:
        """Remove the hidden folder of an unfinished checkpoint."""
        shutil.rmtree(self.partial_dir, ignore_errors=True)

    def add_proofs(self, proofs: Mapping[Path, FileProof]) -> None:
        self._proofs.update(proofs)

    def commit(self, state: CheckpointState, *, keep: int) -> Path:
        """Write state.json, make the checkpoint valid by a rename, and return its folder.

        keep: number of newest checkpoints to keep; older ones are removed, except for the best.

        Raises NoSpaceError or CheckpointError if the disk fails; earlier checkpoints stay valid.
        """
        replaced = self._final_dir.with_name(f".{self._final_dir.name}.replaced")
        with wrap_checkpoint_errors(self._final_dir):
            paths = list_files(self.partial_dir)
            proofs = self._proofs | prove_files(set(paths) - self._proofs.keys())
            files = {str(path.relative_to(self.partial_dir)): proofs[path] for path in paths}
            write_state(self.partial_dir, {**state, "files": files})
            if self._final_dir.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                self._final_dir.rename(replaced)
            sync_and_rename(self.partial_dir, self._final_dir)
            shutil.rmtree(replaced, ignore_errors=True)
            best = link_best_checkpoint(self._final_dir.parent)
        for old in list_checkpoints(self._final_dir.parent)[:-keep]:
            if old != best:
                shutil.rmtree(old)
        return self._final_dir


def write_state(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write state.json, with the hash of its own text, in which _NO_DIGEST holds the place."""
    fields = {"format": CHECKPOINT_FORMAT, "hash": _NO_DIGEST, **fields}
    text = json.dumps(fields, indent=1) + "\n"
    digest = compute_digest(text.encode())
    (folder / "state.json").write_text(text.replace(_NO_DIGEST, digest, 1))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in the folder `checkpoints` of a run, oldest first."""
    return [path for path in _list_step_folders(folder) if (path / "state.json").is_file()]


def link_best_checkpoint(folder: Path) -> Path | None:
    """Let the link `best` name the checkpoint of the best evaluation; return the checkpoint.

    folder: `checkpoints` of a run. Evaluations count that have the settings of the newest one; of
    equal ones the newer is better. Returns None, and removes the link, if there is none.
    """
    evaluations: dict[Path, Mapping[str, float]] = {}
    for path in reversed(list_checkpoints(folder)):
        with contextlib.suppress(ConfigError):  # a resume names what is broken
            if evaluation := read_checkpoint(path).state.get("evaluation"):
                evaluations[path] = evaluation
    newest = next(iter(evaluations.values()), {})
    scores = {
        path: evaluation["mean"]
        for path, evaluation in evaluations.items()
        if evaluation["settings"] == newest["settings"]
    }
    link, new_link = folder / "best", folder / ".best.partial"
    best = max(scores, key=scores.__getitem__, default=None)
    if best is None:
        link.unlink(missing_ok=True)
    else:
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(best.name)
        new_link.replace(link)
    return best


def _list_step_folders(folder: Path) -> list[Path]:
    """Return all folders with the name of a checkpoint, complete or not, oldest first."""
    folders = [path for path in folder.glob("step_*") if _STEP_FOLDER_PATTERN.fullmatch(path.name)]
    return sorted(folders, key=_parse_step)


def _parse_step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def read_checkpoint(folder: Path, *, key: str = "--resume ") -> Checkpoint:
    """Read the checkpoint in a folder. Raises ConfigError if its state.json is not usable.

    key: option or setting that names the folder, for errors.
    """
    location = f"{key}{folder}/state.json"
    fields = _read_state(folder / "state.json", location)
    if fields["format"] == SIZES_ONLY_FORMAT and isinstance(fields.get("files"), dict):
        fields["files"] = {name: (size, "") for name, size in fields["files"].items()}
    if "files" not in fields:
        raise ConfigError(f"{location}: Object missing required field `files`")
    try:
        state = convert(fields, CheckpointState)
        proofs = convert(fields["files"], dict[str, FileProof])
    except ValidationError as error:
        raise ConfigError(f"{location}: {error}") from None
    if _STEP_FOLDER_PATTERN.fullmatch(folder.name) and _parse_step(folder) != state["version"]:
        raise ConfigError(
            f"{location}: version {state['version']} does not match the folder name {folder.name}"
        )
    return Checkpoint(folder, state, proofs)


def _read_state(path: Path, location: str) -> dict[str, Any]:
    """Read state.json, and check the hash of its text, which SIZES_ONLY_FORMAT does not have."""
    with wrap_file_errors(location):
        text = read_small_text(path, most_bytes=MAX_STATE_BYTES)
        state = parse_json(text)
    version = state.get("format") if isinstance(state, dict) else None
    if version not in (CHECKPOINT_FORMAT, SIZES_ONLY_FORMAT):
        raise ConfigError(f"{location}: not a checkpoint of format {CHECKPOINT_FORMAT}")
    digest = str(state.get("hash", ""))
    has_hash = version == CHECKPOINT_FORMAT
    if has_hash and compute_digest(text.replace(digest, _NO_DIGEST, 1).encode()) != digest:
        raise ConfigError(f"{location}: has changed since it was written (hash)")
    return dict(state)


def check_files(checkpoint: Checkpoint, part: str = "", *, key: str = "--resume ") -> None:
    """Raise ConfigError unless every file of a checkpoint has its recorded size and hash.

    part: folder of the checkpoint to which to limit the check. Checkpoints of SIZES_ONLY_FORMAT
    are checked by size.
    """
    prefix = f"{part}/" if part else ""
    proofs = {
        name.removeprefix(prefix): proof
        for name, proof in checkpoint.proofs.items()
        if name.startswith(prefix)
    }
    if not part:
        proofs["state.json"] = FileProof((checkpoint.path / "state.json").stat().st_size, "")
    if problem := find_changed_file(checkpoint.path / part, proofs):
        raise ConfigError(f"{key}{checkpoint.path}: {prefix}{problem}")


def check_model_dir(path: Path, key: str) -> None:
    """Raise ConfigError if a model directory is missing, or of a checkpoint and changed since.

    key: setting or argument that names the directory, such as `model.path=`. A directory elsewhere,
    such as a copy of a checkpoint's model, has no proof.
    """
    if not path.is_dir():
        raise ConfigError(f"{key}{path}: no such directory; a model is a directory on this machine")
    folder = path.resolve()
    for parent in (folder.parent, folder.parent.parent) if folder.name == "model" else ():
        is_own = (parent / "state.json").is_file() or parent.parent.name == "checkpoints"
        if is_own and _STEP_FOLDER_PATTERN.fullmatch(parent.name):
            part = str(folder.relative_to(parent))
            check_files(read_checkpoint(parent, key=key), part, key=key)


def find_model_dir(path: str) -> str:
    """Return the model directory of a run's newest checkpoint; `path` itself if it is no run's."""
    checkpoints = list_checkpoints(Path(path) / "checkpoints")
    return str(get_role_dirs(checkpoints[-1], POLICY)[0]) if checkpoints else path


def suggest_whole_checkpoint(broken: Path) -> str:
    """Return what to do about a broken checkpoint: how to resume from a whole one beside it.

    Returns "" if there is none.
    """
    for path in reversed(list_checkpoints(broken.parent)):
        try:
            whole = read_checkpoint(path)
            check_files(whole)
        except ConfigError:
            continue
        run_dir = path.parent.parent
        if path == list_checkpoints(broken.parent)[-1]:
            return f"; {path.name} is whole: --resume {run_dir}"
        if ResumePoint(run_dir, whole).has_contiguous_journal:
            return (
                f"; {path.name} is whole and the journals continue it: remove {broken.name}, then"
                f" --resume {run_dir}"
            )
        return f"; {path.name} is whole: --resume {path} goes on there and loses later steps"
    return ""


@dataclass(frozen=True)
class QueueLayout:
    """Folders of a run's queue shards: their number and generation.

    When a run continues with another number of shards, its folders get a new generation.
    """

    shards: Annotated[int, Meta(ge=1)]
    generation: _Count = 0

    @property
    def shard_names(self) -> list[str]:
        suffix = f".{self.generation}" if self.generation else ""
        return [f"shard-{i}{suffix}" for i in range(self.shards)]

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / "journal" / LAYOUT_FILE, json.dumps(vars(self)) + "\n")


def read_layout(run_dir: Path, *, shards: int) -> QueueLayout:
    """Read the layout of a run's shard folders.

    shards: number of shards in generation 0, returned if the run has no layout file. Raises
    ConfigError for an unreadable file.
    """
    path = run_dir / "journal" / LAYOUT_FILE
    if not path.exists():
        return QueueLayout(shards)
    with wrap_file_errors(path):
        return convert(read_small_json(path), QueueLayout)


def _get_snapshot_layout(checkpoint: Checkpoint, *, shards: int) -> QueueLayout:
    """Return the layout of the shard folders that a checkpoint holds snapshots of.

    shards: number of shards returned for a checkpoint without snapshots.
    """
    matches = [
        _SHARD_FOLDER_PATTERN.fullmatch(name)
        for name in checkpoint.state["cuts"]
        if name != RUN_LOG_FOLDER
    ]
    generations = {int(match[2] or 0) for match in matches if match}
    if not generations:
        return QueueLayout(shards)
    layout = QueueLayout(len(matches), max(generations))
    if {*layout.shard_names} != checkpoint.state["cuts"].keys() - {RUN_LOG_FOLDER}:
        raise ConfigError(f"--resume {checkpoint.path}/state.json: cuts: shards are missing")
    return layout


def find_next_generation(run_dir: Path) -> int:
    """Return a `QueueLayout.generation` that no shard folder or checkpoint of the run has."""
    names = [path.name for path in (run_dir / "journal").glob("shard-*")]
    for folder in list_checkpoints(run_dir / "checkpoints"):
        names += read_checkpoint(folder).state["cuts"]
    matches = [match for name in names if (match := _SHARD_FOLDER_PATTERN.fullmatch(name))]
    return 1 + max((int(match[2] or 0) for match in matches), default=0)


@dataclass(frozen=True)
class ResumePoint:
    """Point from which a run continues: a checkpoint, or the start of a run without checkpoints.

    should_keep_journal: whether to replay the journal records after the checkpoint. False for a
    checkpoint that the user names although a newer one exists or existed: the journals then
    continue the newer checkpoint.
    """

    run_dir: Path
    checkpoint: Checkpoint | None
    should_keep_journal: bool = True

    @property
    def version(self) -> int:
        return self.checkpoint.version if self.checkpoint else 0

    def read_layout(self, *, shards: int) -> QueueLayout:
        """Return the layout of the run's shard folders at this point.

        shards: number of shards to assume where none is recorded.
        """
        if self.checkpoint is not None and not self.should_keep_journal:
            return _get_snapshot_layout(self.checkpoint, shards=shards)
        return read_layout(self.run_dir, shards=shards)

    @property
    def has_contiguous_journal(self) -> bool:
        """Return whether no journal records are missing between the checkpoint and the journals."""
        return self.checkpoint is None or not _find_journal_gaps(self.run_dir, self.checkpoint)

    def find_snapshot(self, name: str) -> SnapshotBase:
        """Return the snapshot that the journal of a shard continues; empty without a checkpoint.

        name: folder of the shard.
        """
        return (
            SnapshotBase() if self.checkpoint is None else _find_snapshot_in(self.checkpoint, name)
        )

    def discard_later(self) -> None:
        """Remove files that a resume must not find: unfinished checkpoints and abandoned state.

        If should_keep_journal is false, the run continues differently from here, so newer
        checkpoints and the journal segments after this point are removed too.
        """
        folder = self.run_dir / "checkpoints"
        forgotten = self.run_dir.glob(get_partial_path(Path(DISCARDED)).name)
        for partial in (*folder.glob(".step_*.partial"), *forgotten):
            shutil.rmtree(partial)
        for replaced in folder.glob(".step_*.replaced"):
            target = folder / replaced.name[1:].removesuffix(".replaced")
            if target.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(target)
        if self.checkpoint is None or self.should_keep_journal:
            return
        later = [path for path in _list_step_folders(folder) if _parse_step(path) > self.version]
        keep_links(self.run_dir, [*later, self.run_dir / "journal"])
        cuts = self.checkpoint.state["cuts"]
        # Crash safety. Journals go before newer checkpoints: after a crash in between, the newer
        # checkpoints are still complete. Journals with a gap go last: while a gap remains, no
        # resume mistakes the other journals for continuations of this checkpoint.
        gaps = _find_journal_gaps(self.run_dir, self.checkpoint)
        for name in sorted(cuts, key=lambda name: name in gaps):
            delete_segments_from(get_journal_dir(self.run_dir, name), cuts[name])
        layout = _get_snapshot_layout(self.checkpoint, shards=0)
        if layout.shards:
            layout.write(self.run_dir)
        for path in reversed(later):
            shutil.rmtree(path)
        link_best_checkpoint(folder)


def find_run_dir(path: Path) -> Path:
    """Return the run directory at `path`, which may also be a checkpoint in the directory."""
    folder = path.resolve()
    return folder.parent.parent if (folder / "state.json").is_file() else folder


def find_resume_point(path: Path) -> ResumePoint:
    """Return the point from which to resume the run or checkpoint at `path`.

    A run resumes from its newest checkpoint, or from its start without one. Raises ConfigError if
    the path is neither a run nor a checkpoint.
    """
    run_dir, folder = find_run_dir(path), path.resolve()
    if run_dir != folder:
        named = ResumePoint(run_dir, _read_or_suggest(folder))
        is_newest = list_checkpoints(folder.parent)[-1:] == [folder]
        return replace(named, should_keep_journal=is_newest and named.has_contiguous_journal)
    complete = list_checkpoints(folder / "checkpoints")
    if complete:
        return ResumePoint(folder, _read_or_suggest(complete[-1]))
    metrics = folder / METRICS_FILE
    # A run that died before its first step may have no run log, and needs none.
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    is_resumable = get_journal_dir(folder, RUN_LOG_FOLDER).is_dir() or not has_steps
    check_run_dir(folder)
    if not is_resumable:
        raise ConfigError(
            f"{path}: cannot be resumed: it has trained steps, but no checkpoint and no journal"
        )
    return ResumePoint(folder, None)


def _read_or_suggest(folder: Path) -> Checkpoint:
    """Read a checkpoint; if that fails, add to the error which other one is whole."""
    try:
        return read_checkpoint(folder)
    except ConfigError as error:
        raise ConfigError(f"{error}{suggest_whole_checkpoint(folder)}") from None


def get_journal_dir(run_dir: Path, name: str) -> Path:
    """Return the journal folder of a shard (of `QueueLayout.shard_names`) or of the run log."""
    return run_dir / "journal" / name


def find_snapshot(run_dir: Path, shard: str) -> SnapshotBase:
    """Return a shard's snapshot in the newest checkpoint, and the segment that continues it.

    Empty for a shard folder younger than the checkpoint: its journal has all records.
    """
    complete = list_checkpoints(run_dir / "checkpoints")
    return _find_snapshot_in(read_checkpoint(complete[-1]), shard) if complete else SnapshotBase()


def _find_snapshot_in(checkpoint: Checkpoint, shard: str) -> SnapshotBase:
    cut = checkpoint.state["cuts"].get(shard)
    return SnapshotBase() if cut is None else SnapshotBase(checkpoint.path / "queue" / shard, cut)


def _find_journal_gaps(run_dir: Path, checkpoint: Checkpoint) -> set[str]:
    """Return the shards and the run log, by folder name, that lack records after a checkpoint."""
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
    """Remove the journal folders of shards outside the layout.

    Call it only after a checkpoint with this layout is complete; no checkpoint is looked at.
    """
    for path in (run_dir / "journal").glob("shard-*"):
        if path.name not in layout.shard_names and _SHARD_FOLDER_PATTERN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def link_checkpoint(checkpoint: Checkpoint, run_dir: Path) -> Checkpoint:
    """Hard-link a checkpoint into another run directory, or copy it between file systems.

    Links are safe because the files of a checkpoint never change. Returns the new checkpoint.
    Raises OSError if the disk is full.
    """
    target = run_dir / "checkpoints" / checkpoint.path.name
    shutil.copytree(checkpoint.path, target, copy_function=link_or_copy)
    return read_checkpoint(target)
