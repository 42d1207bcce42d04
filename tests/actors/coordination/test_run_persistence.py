"""Checkpoints of a run: on a full disk nothing partial remains; each holds its own evaluation."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors.coordination.run_persistence import (
    NO_SPACE_RETRY_STEPS,
    RunPersistence,
    hash_evaluation_settings,
)
from streamrl.buffer.journal import Journal, JournalConfig
from streamrl.errors import JournalError, NoSpaceError, StreamError
from streamrl.run_dir.checkpoint import (
    CheckpointConfig,
    get_journal_dir,
    get_role_dirs,
    read_checkpoint,
)
from streamrl.stream.evaluation.config import EvaluationConfig


class Trainer:
    async def save_checkpoint(self, writer: Any) -> None:
        await asyncio.sleep(0.01)
        get_role_dirs(writer.partial_dir, "policy")[0].mkdir(parents=True)


class Shard:
    """Shard that raises the given errors."""

    def __init__(self, cut: StreamError | None = None, snapshot: StreamError | None = None) -> None:
        self._cut, self._snapshot = cut, snapshot
        self.discarded: list[int] = []

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        return await getattr(self, method.__name__)(*args)

    async def rotate_journal(self) -> int:
        if self._cut:
            raise self._cut
        return 1

    async def write_snapshot(self, cut: int, out: Path) -> dict[Path, Any]:
        out.mkdir(parents=True)
        if self._snapshot:
            raise self._snapshot
        return {}

    async def discard_before(self, cut: int) -> None:
        self.discarded.append(cut)


def make_config(**changes: Any) -> Any:
    parts: dict[str, Any] = {"rewards": ["exact"], "environment": None}
    parts |= {"evaluation": EvaluationConfig(), "data": SimpleNamespace(eval="eval.jsonl")}
    parts |= {"generator": SimpleNamespace(max_new_tokens=8)}
    return SimpleNamespace(**parts | changes)


def make_persistence(run_dir: Path, shard: Shard) -> Any:
    """Return a RunPersistence, and a function that saves a checkpoint of version 3."""
    journal = SimpleNamespace(max_mb=1, enabled=True)
    config: Any = make_config()
    config.checkpoint, config.queue = CheckpointConfig(), SimpleNamespace(journal=journal)
    shards: Any = [shard]
    persistence = RunPersistence(config, run_dir, shards, None)
    persistence._journal = Journal(get_journal_dir(run_dir, "books"), JournalConfig())
    admission = SimpleNamespace(version=3, ledger=SimpleNamespace(state_dict=dict))
    run_state: Any = SimpleNamespace(
        run_log=SimpleNamespace(steps_to_replay={}),
        admission=admission,
        run_log_lock=asyncio.Lock(),
        prompt_source=SimpleNamespace(state_dict=dict),
        adaptive_params=SimpleNamespace(state_dict=dict),
    )
    trainers: Any = [Trainer()]

    async def wait_until_reported() -> None:
        await asyncio.sleep(0)

    return persistence, lambda: persistence.save_checkpoint(
        run_state, trainers, wait_until_reported
    )


@pytest.mark.parametrize("where", ["cut", "snapshot"])
@pytest.mark.parametrize("error_type", [NoSpaceError, JournalError])
async def test_a_failed_checkpoint_leaves_no_partial_files_and_can_be_retried(
    tmp_path: Path, where: str, error_type: type[StreamError]
):
    error = error_type("00000002.journal cannot be begun: No space left on device")
    shard = Shard(**{where: error})
    persistence, save = make_persistence(tmp_path, shard)
    with pytest.raises(error_type, match="cannot be begun"):
        await save()
    assert list((tmp_path / "checkpoints").iterdir()) == [] and shard.discarded == []
    is_postponed = not persistence.is_due(3 + NO_SPACE_RETRY_STEPS - 1, 1 << 30)
    assert is_postponed == (error_type is NoSpaceError)
    shard._cut = shard._snapshot = None
    path = await save()
    assert path == tmp_path / "checkpoints" / "step_000003" and shard.discarded == [1]


@pytest.mark.parametrize(
    ("last", "recorded"), [(None, None), ((2, 0.5), None), ((3, 0.5), 0.5), ((3, math.nan), None)]
)
async def test_a_checkpoint_holds_the_evaluation_of_its_own_version(
    tmp_path: Path, last: tuple[int, float] | None, recorded: float | None
):
    persistence, save = make_persistence(tmp_path, Shard())
    persistence.last_evaluation = last
    evaluation = read_checkpoint(await save()).state.get("evaluation", {})
    assert evaluation.get("mean") == recorded
    assert (tmp_path / "checkpoints" / "best").is_symlink() == (recorded is not None)


def test_evaluations_can_be_compared_unless_a_setting_of_their_scores_changes():
    first = hash_evaluation_settings(make_config())
    oftener = EvaluationConfig(every=5, at_start=False)
    assert hash_evaluation_settings(make_config(evaluation=oftener)) == first
    greedy = EvaluationConfig(temperature=0.0)
    assert hash_evaluation_settings(make_config(evaluation=greedy)) != first
    assert hash_evaluation_settings(make_config(rewards=["judge"])) != first
