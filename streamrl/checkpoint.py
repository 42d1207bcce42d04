"""Checkpoints on disk: whole or not there. The newest complete one is where a run resumes.

<run>/checkpoints/step_000020/model/       Hugging Face directory
                              trainer/     optimizer, scheduler and RNG of every rank
                              critic/      the same two of the critic, where there is one
                              queue/       the groups in flight, a folder per shard
                              state.json   version, ledger, data position, cuts of the journals
<run>/journal/                             a folder per shard, and the books: what came since
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from streamrl.buffer.keeper import forget_from
from streamrl.buffer.recovery import Base
from streamrl.dataflow import POLICY
from streamrl.durable import move_whole
from streamrl.errors import CheckpointError, ConfigError
from streamrl.settings import unreadable
from streamrl.small_file import MIB, read_small_json
from streamrl.telemetry.sinks import METRICS_FILE

FORMAT = 3
MOST_STATE_BYTES = 256 * MIB
"""Of state.json: the uids of all groups in flight, some times over."""
BOOKS = "books"
_NAME = re.compile(r"step_(\d{6,})")


class State(TypedDict):
    """What state.json of a checkpoint has beside its format."""

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
    state: State

    @property
    def version(self) -> int:
        """The policy_version it holds."""
        return self.state["version"]

    @property
    def model_dir(self) -> Path:
        """The policy as a Hugging Face directory."""
        return self.dirs(POLICY)[0]

    def dirs(self, role: str) -> tuple[Path, Path]:
        """A trained model as a Hugging Face directory, and its ranks' training state."""
        return role_dirs(self.path, role)


def role_dirs(path: Path, role: str) -> tuple[Path, Path]:
    """Where a checkpoint has the model of a role, and the state of its trainer."""
    folder = path if role == POLICY else path / role
    return folder / "model", folder / "trainer"


class CheckpointWriter:
    """Writes the checkpoint of one version: fill `dirs` of every role, then `commit`."""

    def __init__(self, run_dir: Path, version: int) -> None:
        self._final = run_dir / "checkpoints" / f"step_{version:06d}"
        self._partial = self._final.with_name(f".{self._final.name}.partial")
        self.queue_dir = self._partial / "queue"
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def dirs(self, role: str) -> tuple[Path, Path]:
        """Where the model of a role goes, and the state of its trainer."""
        return role_dirs(self._partial, role)

    def commit(self, state: State, *, keep: int) -> Path:
        """Make the checkpoint visible in one rename, then remove all but the newest `keep`.

        Raises CheckpointError if the disk refuses; what was there before stays.
        """
        try:
            text = json.dumps({"format": FORMAT, **state}, indent=1)
            (self._partial / "state.json").write_text(text + "\n")
            shutil.rmtree(self._final, ignore_errors=True)
            move_whole(self._partial, self._final)
        except OSError as error:
            raise CheckpointError(f"checkpoint {self._final}: {error}") from error
        for old in list_checkpoints(self._final.parent)[:-keep]:
            shutil.rmtree(old)
        return self._final


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoint directories in `folder`, oldest first."""
    found = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    complete = [path for path in found if (path / "state.json").is_file()]
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step_")))


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a directory. Raises ConfigError for one that cannot be used."""
    try:
        state = read_small_json(folder / "state.json", most_bytes=MOST_STATE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {folder}/state.json: {unreadable(error)}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError(f"--resume {folder}/state.json: not a checkpoint of format {FORMAT}")
    lacks = sorted(State.__required_keys__ - state.keys())
    if lacks:
        raise ConfigError(f"--resume {folder}/state.json: lacks {', '.join(lacks)}")
    if not isinstance(state["version"], int):
        raise ConfigError(f"--resume {folder}/state.json: version {state['version']!r}: no integer")
    return Checkpoint(folder, cast(State, state))


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: at a checkpoint, or at its very start if it died before its first.

    `keeps_journal` says whether what came after the checkpoint is part of it; not so for a
    checkpoint that is named itself, if there are newer ones.
    """

    run_dir: Path
    checkpoint: Checkpoint | None
    keeps_journal: bool = True

    @property
    def version(self) -> int:
        """The policy_version it goes on from."""
        return self.checkpoint.version if self.checkpoint else 0

    def discard_later(self) -> None:
        """Remove what lies behind this point: the run goes on from here another way."""
        for partial in (self.run_dir / "checkpoints").glob(".step_*.partial"):
            shutil.rmtree(partial)
        if self.checkpoint is None or self.keeps_journal:
            return
        # The journals first: cut off in between, the newer checkpoints still stand for themselves.
        for name, cut in self.checkpoint.state["cuts"].items():
            forget_from(journal_dir(self.run_dir, name), cut)
        for path in reversed(list_checkpoints(self.checkpoint.path.parent)):
            if int(path.name.removeprefix("step_")) > self.version:
                shutil.rmtree(path)


def find_resume_point(path: Path) -> ResumePoint:
    """Where to go on: the newest checkpoint of a run directory, its start, or the one named.

    Raises ConfigError if there is nothing to go on from.
    """
    if not path.is_dir():
        raise ConfigError(f"--resume {path}: no such directory")
    folder = path.resolve()
    if (folder / "state.json").is_file():
        run_dir = folder.parent.parent
        newest = list_checkpoints(folder.parent)[-1:] == [folder]
        return ResumePoint(run_dir, read_checkpoint(folder), keeps_journal=newest)
    complete = list_checkpoints(folder / "checkpoints")
    if complete:
        return ResumePoint(folder, read_checkpoint(complete[-1]))
    metrics = folder / METRICS_FILE
    # A run that died before its first step has no books yet, and nothing that they would tell.
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    is_told = journal_dir(folder, BOOKS).is_dir() or not has_steps
    if not (folder / "config.yaml").is_file() or not is_told:
        raise ConfigError(
            f"--resume {path}: not a checkpoint, nor a run directory that holds one or a journal"
        )
    return ResumePoint(folder, None)


def journal_dir(run_dir: Path, owner: str) -> Path:
    """Where a shard (shard-<i>) or the coordinator (books) keeps its journal."""
    return run_dir / "journal" / owner


def find_base(run_dir: Path, shard: str) -> Base:
    """The snapshot of a shard in the newest complete checkpoint, and the cut it was made at."""
    complete = list_checkpoints(run_dir / "checkpoints")
    if not complete:
        return Base()
    cut = read_checkpoint(complete[-1]).state["cuts"][shard]
    return Base(complete[-1] / "queue" / shard, cut)
