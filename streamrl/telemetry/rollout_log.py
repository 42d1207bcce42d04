"""Recorded rollouts of a run: `rollouts/step_000012.jsonl` has a few groups of a training step.

A line is a group. A rollout of an environment also has its turns, so that it can be read token by
token. Rollouts recorded without an environment, or by an earlier version, have only their text.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ConfigError
from streamrl.files.atomic_write import wrap_disk_errors, write_atomic
from streamrl.files.bounded_read import read_jsonl
from streamrl.messages import TokenSource

ROLLOUTS_FOLDER = "rollouts"
SAMPLED = TokenSource.SAMPLED.name.lower()
PROMPT = TokenSource.PROMPT.name.lower()
SCAFFOLD = TokenSource.SCAFFOLD.name.lower()


class RecordedTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive tokens of a rollout with the same source.

    source: name of the TokenSource, lower case.
    text: decoded tokens, special tokens included.
    tokens: number of tokens; None if unknown.
    reward, outcome: of a sampled turn: the environment's reward, and the TurnOutcome, lower case.
    versions: of a sampled turn: policy version and number of consecutive tokens that it sampled.
    piece_lengths: characters of `text` per token; for the first tokens of a sampled turn.
    logprobs: logprob of each of these tokens when sampled; None if it is not finite.
    """

    source: str
    text: str
    tokens: int | None = None
    reward: float | None = None
    outcome: str | None = None
    versions: tuple[tuple[int, int], ...] = ()
    piece_lengths: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()


class RecordedRollout(msgspec.Struct, frozen=True):
    """Scored rollout.

    completion: text after the prompt, without special tokens.
    turns: all tokens of the rollout, its prompt included; empty without an environment.
    finish_reason: name of the FinishReason, lower case; None if unknown.
    """

    completion: str
    score: float
    components: dict[str, float | None] = {}
    verdicts: dict[str, str] = {}
    turns: tuple[RecordedTurn, ...] = ()
    finish_reason: str | None = None
    environment_score: float | None = None

    @property
    def visible_turns(self) -> tuple[RecordedTurn, ...]:
        """Turns; without an environment a single one, of the text alone."""
        return self.turns or (RecordedTurn(SAMPLED, self.completion),)

    @property
    def prompt_text(self) -> str | None:
        """Rendered prompt; None if it was not recorded."""
        return next((turn.text for turn in self.turns if turn.source == PROMPT), None)

    @property
    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest version that sampled a token; None if unknown."""
        versions = [version for turn in self.turns for version, _ in turn.versions]
        return (min(versions), max(versions)) if versions else None


class RecordedGroup(msgspec.Struct, frozen=True):
    """Rollouts of a prompt, all of which were trained in the training step `step`.

    environment: name of their environment; "" if the run has no named ones.
    """

    step: int
    uid: str
    rollouts: tuple[RecordedRollout, ...]
    prompt: tuple[dict[str, Any], ...] = ()
    ground_truth: Any = None
    environment: str = ""

    @property
    def mean_score(self) -> float:
        """Mean of the rollouts' scores; NaN for a group without rollouts."""
        scores = [rollout.score for rollout in self.rollouts]
        return math.fsum(scores) / len(scores) if scores else math.nan


class RolloutLog:
    """Writer of the rollouts of every step; a step has a file of its own."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / ROLLOUTS_FOLDER

    def discard_steps_after(self, step: int) -> None:
        """Delete the files of steps after `step`, which a resumed run trains again."""
        for number, path in _list_step_files(self._folder).items():
            if number > step:
                path.unlink()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the sampled groups of a training step; no file without samples. Raises
        DiskError."""
        if not samples:
            return
        lines = [json.dumps(sample, default=str, ensure_ascii=False) for sample in samples]
        path = self._folder / f"step_{step:06d}.jsonl"
        # A lone surrogate, which JSON may hold but not UTF-8, becomes JSON's escape of it.
        text = "\n".join(lines).encode("utf-8", "backslashreplace").decode()
        with wrap_disk_errors(path):
            self._folder.mkdir(exist_ok=True)
            write_atomic(path, text + "\n")


def list_recorded_steps(run_dir: Path) -> list[int]:
    """Return the training steps with recorded rollouts, ascending."""
    return sorted(_list_step_files(run_dir / ROLLOUTS_FOLDER))


def read_recorded_groups(run_dir: Path, step: int) -> list[RecordedGroup]:
    """Return the recorded groups of a training step; [] if it has none.

    Raises ConfigError with file and line for a row that is not a group.
    """
    path = _list_step_files(run_dir / ROLLOUTS_FOLDER).get(step)
    groups = []
    for number, row in enumerate(read_jsonl(path) if path else (), start=1):
        try:
            if not isinstance(row, dict):
                raise msgspec.ValidationError("Expected `object`")
            groups.append(msgspec.convert({**row, "step": step}, RecordedGroup))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}:{number}: not a recorded group: {error}") from None
    return groups


def _list_step_files(folder: Path) -> dict[int, Path]:
    numbers = {path: path.stem.removeprefix("step_") for path in folder.glob("step_*.jsonl")}
    return {int(number): path for path, number in numbers.items() if number.isdecimal()}
