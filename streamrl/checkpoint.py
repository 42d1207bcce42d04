"""Checkpoints on disk: whole or not there. The newest complete one is where a run resumes.

<run>/checkpoints/step_000020/model/       Hugging Face directory
                              trainer/     optimizer, scheduler and RNG of every rank
                              state.json   version, ledger, data position
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.durable import move_whole
from streamrl.errors import CheckpointError, ConfigError

FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")


@dataclass
class CheckpointConfig:
    """When the run is saved.

    every: steps between checkpoints; 0 saves at the end only.
    keep: newest checkpoints kept.
    at_end: save when the run ends.
    on_interrupt: save when the run is interrupted (Ctrl-C).
    """

    every: int = 0
    keep: int = 2
    at_end: bool = True
    on_interrupt: bool = True

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"checkpoint.every={self.every}: must be 0 or more steps")
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep={self.keep}: must be at least 1")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory."""

    path: Path
    state: Mapping[str, Any]

    @property
    def version(self) -> int:
        """The policy_version it holds."""
        return int(self.state["version"])

    @property
    def model_dir(self) -> Path:
        """The policy as a Hugging Face directory."""
        return self.path / "model"

    @property
    def trainer_dir(self) -> Path:
        """The ranks' training state."""
        return self.path / "trainer"


class CheckpointWriter:
    """Writes the checkpoint of one version: fill `model_dir` and `trainer_dir`, then `commit`."""

    def __init__(self, run_dir: Path, version: int) -> None:
        self._final = run_dir / "checkpoints" / f"step_{version:06d}"
        self._partial = self._final.with_name(f".{self._final.name}.partial")
        self.model_dir = self._partial / "model"
        self.trainer_dir = self._partial / "trainer"
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def commit(self, state: Mapping[str, Any], *, keep: int) -> Path:
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


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest of the run directory `path`.

    Raises ConfigError if there is none.
    """
    if not path.is_dir():
        raise ConfigError(f"--resume {path}: no such directory")
    folder = path.resolve()
    if not (path / "state.json").is_file():
        complete = list_checkpoints(folder / "checkpoints")
        if not complete:
            raise ConfigError(
                f"--resume {path}: not a checkpoint, nor a run directory that holds one"
            )
        folder = complete[-1]
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {folder}/state.json: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError(f"--resume {folder}/state.json: not a checkpoint of format {FORMAT}")
    if not {"version", "ledger", "prompts"} <= state.keys():
        raise ConfigError(f"--resume {folder}/state.json: lacks version, ledger or prompts")
    if not isinstance(state["version"], int):
        raise ConfigError(f"--resume {folder}/state.json: version {state['version']!r}: no integer")
    return Checkpoint(folder, state)


def discard_later(checkpoint: Checkpoint) -> None:
    """Remove the run's checkpoints behind this one: the run goes on from here another way."""
    folder = checkpoint.path.parent
    for path in list_checkpoints(folder):
        if int(path.name.removeprefix("step_")) > checkpoint.version:
            shutil.rmtree(path)


def run_dir_of(checkpoint: Checkpoint) -> Path:
    """The run directory a checkpoint lies in."""
    return checkpoint.path.parent.parent
