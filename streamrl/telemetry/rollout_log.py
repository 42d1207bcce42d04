"""Recorded rollouts of a run: `rollouts/step_000012.parquet` has a training step's groups.

    pandas.read_parquet("runs/mine/rollouts")       # all steps

A row is a rollout. The columns `prompt`, `ground_truth` and `turns` are JSON; `turns` has the
tokens of the rollout by source, so that an episode can be read turn by turn.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.files.atomic_write import wrap_disk_errors, write_atomic
from streamrl.files.bounded_read import open_regular_file, parse_json, wrap_file_errors
from streamrl.messages import TokenSource, parse_uid
from streamrl.telemetry.metric_names import select_prefixed, to_json_value

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
    scores: of a sampled turn: index of a token and what of the rollout's score falls on it; () if
        all of the score falls on the rollout's last token.
    versions: of a sampled turn: policy version and number of consecutive tokens that it sampled.
    piece_lengths: characters of `text` per token; for the first tokens of a sampled turn.
    logprobs: logprob of each of these tokens when sampled; None if it is not finite.
    """

    source: str
    text: str
    tokens: int | None = None
    reward: float | None = None
    outcome: str | None = None
    scores: tuple[tuple[int, float], ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    piece_lengths: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()


class RecordedRollout(msgspec.Struct, frozen=True):
    """Scored rollout.

    completion: text after the prompt, without special tokens.
    advantage: mean advantage of its trained tokens; None if unknown.
    row: its row in the columns of the group; that of its first sample if it has several.
    numbers: extra numbers of the rewards, by component and name.
    tokens: number of sampled tokens; None if unknown.
    versions: oldest and newest version that sampled a token; () if unknown.
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
    row: int = 0
    numbers: dict[str, dict[str, float]] = {}
    advantage: float | None = None
    tokens: int | None = None
    versions: tuple[int, ...] = ()

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
        versions = versions or [*self.versions]
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
    """Writer of the rollouts of every `every`-th step; a step has a file of its own.

    max_bytes: size of the folder from which every second step of those recorded is deleted.
    """

    def __init__(self, run_dir: Path, *, every: int = 1, max_bytes: float = math.inf) -> None:
        self.run_dir = run_dir
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._every = every
        self._max_bytes = max_bytes

    def discard_steps_from(self, step: int) -> None:
        """Delete the files from `step` on, which a resumed run writes anew."""
        for number, path in _list_step_files(self._folder).items():
            if number >= step:
                path.unlink()

    def write_groups(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        """Write the groups of a training step, in the order of their uids. Raises DiskError.

        Does nothing for a step that is not recorded, or without groups.
        """
        if not groups or not self._every or step % self._every:
            return
        path = self._folder / f"step_{step:06d}.parquet"
        content = _encode_groups(sorted(groups, key=lambda group: parse_uid(group.uid)))
        with wrap_disk_errors(path):
            self._folder.mkdir(exist_ok=True)
            write_atomic(path, content)
            self._thin_out()

    def _thin_out(self) -> None:
        """While the folder is too large, record half as often, and delete the steps between.

        The latest step stays.
        """
        files = _list_step_files(self._folder)
        sizes = {step: path.stat().st_size for step, path in files.items()}
        while sum(sizes.values()) > self._max_bytes and len(sizes) > 1:
            self._every *= 2
            for step in [step for step in sizes if step % self._every and step != max(sizes)]:
                files[step].unlink()
                del sizes[step]


def _encode_groups(groups: Sequence[RecordedGroup]) -> bytes:
    """Return groups as a parquet file with a row per rollout."""
    rows = [make_row(group, i) for group in groups for i in range(len(group.rollouts))]
    names = dict.fromkeys(name for row in rows for name in row)
    kinds = {name: name[: name.find("/") + 1] or name for name in names}
    types = [(name, _COLUMN_TYPES.get(kind, pa.string())) for name, kind in kinds.items()]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), buffer, compression="zstd")
    return buffer.getvalue()


_SCORE_PREFIX, _VERDICT_PREFIX, _NUMBER_PREFIX = "score/", "verdict/", "number/"
_COLUMN_TYPES = {
    **dict.fromkeys(("step", "version_min", "version_max"), pa.int64()),
    **dict.fromkeys(("rollout", "tokens"), pa.int32()),
    **dict.fromkeys(("score", "advantage", "environment_score"), pa.float64()),
    **dict.fromkeys((_SCORE_PREFIX, _NUMBER_PREFIX), pa.float64()),
}
"""Types of the columns that are not text, by name or prefix."""


def make_row(group: RecordedGroup, index: int) -> dict[str, Any]:
    """Return a rollout of a group as a row; values that are not known are None."""
    rollout = group.rollouts[index]
    oldest, newest = rollout.version_range or (None, None)
    return {
        "step": group.step,
        "uid": group.uid,
        "rollout": index,
        "environment": group.environment,
        "prompt": _to_json(group.prompt),
        "ground_truth": _to_json(group.ground_truth),
        "completion": _clean_text(rollout.completion),
        "score": rollout.score,
        "advantage": rollout.advantage,
        "tokens": rollout.tokens,
        "version_min": oldest,
        "version_max": newest,
        "finish_reason": rollout.finish_reason,
        "environment_score": rollout.environment_score,
        **{f"{_SCORE_PREFIX}{name}": value for name, value in rollout.components.items()},
        **{f"{_VERDICT_PREFIX}{name}": verdict for name, verdict in rollout.verdicts.items()},
        **{
            f"{_NUMBER_PREFIX}{name}/{key}": value
            for name, numbers in rollout.numbers.items()
            for key, value in numbers.items()
        },
        "turns": _to_json(rollout.turns),
    }


def _to_json(value: object) -> str:
    return _clean_text(json.dumps(msgspec.to_builtins(value), default=str, ensure_ascii=False))


def _clean_text(text: str) -> str:
    """Return text that UTF-8 can hold: a lone surrogate becomes JSON's escape of it."""
    return text.encode("utf-8", "backslashreplace").decode()


def list_recorded_steps(run_dir: Path) -> list[int]:
    """Return the training steps with recorded rollouts, ascending."""
    return sorted(_list_step_files(run_dir / ROLLOUTS_FOLDER))


def read_recorded_groups(run_dir: Path, step: int) -> list[RecordedGroup]:
    """Return the recorded groups of a training step; [] if it has none.

    Raises ConfigError with the file for rows that are not rollouts.
    """
    path = _list_step_files(run_dir / ROLLOUTS_FOLDER).get(step)
    if path is None:
        return []
    with wrap_file_errors(path), open_regular_file(path) as file:
        try:
            groups: dict[str, dict[str, Any]] = {}
            for row in pq.read_table(file).to_pylist():
                texts = {name: parse_json(row[name]) for name in ("prompt", "ground_truth")}
                group = groups.setdefault(row["uid"], {**row, **texts, "rollouts": []})
                group["rollouts"].append(_read_rollout_fields(row))
            return [msgspec.convert(group, RecordedGroup) for group in groups.values()]
        except (pa.ArrowException, KeyError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"not recorded rollouts: {error}") from None


def _read_rollout_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    versions = [row["version_min"], row["version_max"]]
    verdicts = select_prefixed(row, _VERDICT_PREFIX)
    scores = select_prefixed(row, _SCORE_PREFIX)
    return {
        **row,
        "turns": parse_json(row["turns"]),
        "versions": [version for version in versions if version is not None],
        # A component that abstained has a verdict without a score.
        "components": {name: scores.get(name) for name in verdicts or scores},
        "verdicts": verdicts,
    }


def groups_to_json(groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Return groups as JSON types, with mean and relative scores; null if not finite."""
    described = []
    for group in groups:
        mean = group.mean_score
        rollouts = []
        for rollout in group.rollouts:
            numbers = {"score": rollout.score, "relative_score": rollout.score - mean}
            numbers |= {} if rollout.advantage is None else {"advantage": rollout.advantage}
            finite = {name: to_json_value(number) for name, number in numbers.items()}
            rollouts.append(msgspec.to_builtins(rollout) | finite)
        facts = {"mean_score": to_json_value(mean), "rollouts": rollouts}
        described.append(msgspec.to_builtins(group) | facts)
    return {"groups": described}


def _list_step_files(folder: Path) -> dict[int, Path]:
    """Return the files of recorded steps by step."""
    numbers = {path: path.stem.removeprefix("step_") for path in folder.glob("step_*.parquet")}
    return {int(number): path for path, number in numbers.items() if number.isdecimal()}
