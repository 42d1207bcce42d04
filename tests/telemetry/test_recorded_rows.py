"""Steps that a resumed run repeats: recorded rows stand, and a repeat that differs ends it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import CheckpointError
from streamrl.telemetry.recorded_rows import RecordedRows

FACTS = {"on_gpu": False, "cores": 2, "layout": "one rank", "objective": "grpo"}
ROW = {
    "reward/mean": 0.5,
    "loss/policy": 1.25e-8,
    "loss/value": math.nan,
    "policy/lr": 1e-3,
    "policy/entropy": 2.0,
    "correction/kl": 1e-8,
    "eval/pass_at_1": 0.25,
    "ledger/admitted": 32,
    "time/step_s": 0.5,
}
TODAY = {"eval/pass_at_1": 0.5, "ledger/admitted": 40, "time/step_s": 7.0, "weights/faults": 3}
"""Values that a repeat does not have to bring again."""


def record(run_dir: Path, *starts: tuple[float, dict[str, Any]]) -> None:
    """Record steps 1 to 4 at 10 s to 40 s, and the given starts of the run."""
    values = {name: None if math.isnan(value) else value for name, value in ROW.items()}
    rows = [{"step": step, "time": 10.0 * step, **values} for step in range(1, 5)]
    events = [{"time": time, "event": "machine", **facts} for time, facts in starts]
    for name, lines in (("metrics.jsonl", rows), ("events.jsonl", events)):
        (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def repeat(
    run_dir: Path,
    changes: Mapping[str, float] = {},
    *,
    step: int = 3,
    facts: dict[str, Any] = FACTS,
) -> bool:
    """Repeat a step after a checkpoint at step 2, with some metrics changed."""
    rows = RecordedRows(run_dir, after=2, facts=facts)
    return rows.check_repeat(step, {**ROW, **TODAY, **changes})


def test_a_repeated_step_with_the_same_numbers_keeps_its_recorded_row(tmp_path: Path):
    record(tmp_path, (0.0, FACTS))
    assert repeat(tmp_path)
    assert not repeat(tmp_path, step=5), "a step without a row is logged"
    assert not repeat(tmp_path, {"loss/policy": 7.0}, step=2), "the checkpoint has it"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("correction/kl", 3.9),
        ("loss/policy", math.nextafter(1.25e-8, 1.0)),
        ("loss/value", 0.5),
        ("reward/mean", math.nan),
    ],
)
def test_a_repeated_step_that_differs_names_the_first_metric(
    tmp_path: Path, name: str, value: float
):
    record(tmp_path, (0.0, FACTS))
    with pytest.raises(CheckpointError, match=f"^step 3, repeated .* has {name} .*cut"):
        repeat(tmp_path, {name: value})


@pytest.mark.parametrize(
    "starts",
    [
        [(0.0, {**FACTS, "cores": 4})],
        [(0.0, {**FACTS, "layout": "two ranks"})],
        [(0.0, FACTS), (25.0, {**FACTS, "layout": "two ranks"})],
        [(0.0, FACTS), (99.0, {**FACTS, "cores": 4})],
    ],
)
def test_rows_of_another_machine_or_layout_may_differ_in_rounding(
    tmp_path: Path, starts: list[tuple[float, dict[str, Any]]]
):
    record(tmp_path, *starts)
    rounded = {"loss/policy": 3e-7, "policy/entropy": 2.0001, "correction/kl": 2e-6}
    assert repeat(tmp_path, rounded)
    with pytest.raises(CheckpointError, match=r"correction/kl 3\.9"):
        repeat(tmp_path, {"correction/kl": 3.9})


def test_a_start_that_recorded_none_of_the_rows_does_not_count(tmp_path: Path):
    record(tmp_path, (0.0, {**FACTS, "objective": "ppo"}), (25.0, FACTS))
    with pytest.raises(CheckpointError, match="loss/policy"):
        repeat(tmp_path, {"loss/policy": 3e-8})


def test_rows_from_before_a_return_to_an_older_checkpoint_have_no_repeats(tmp_path: Path):
    record(tmp_path, (0.0, FACTS), (35.0, {**FACTS, "goes_back": True}))
    assert not repeat(tmp_path, {"correction/kl": 3.9}, step=3)
    with pytest.raises(CheckpointError, match="correction/kl"):
        repeat(tmp_path, {"correction/kl": 3.9}, step=4)


def test_a_step_under_other_settings_or_another_rate_is_not_compared(tmp_path: Path):
    record(tmp_path, (0.0, FACTS))
    assert repeat(tmp_path, {"policy/lr": 2e-3, "correction/kl": 3.9})
    assert repeat(tmp_path, {"correction/kl": 3.9}, facts={**FACTS, "objective": "ppo"})
    record(tmp_path, (0.0, {"on_gpu": False}))
    assert repeat(tmp_path, {"correction/kl": 3.9}), "an earlier version recorded no settings"


def test_on_gpus_a_repeat_may_differ_in_rounding(tmp_path: Path):
    facts = {**FACTS, "on_gpu": True}
    record(tmp_path, (0.0, facts))
    assert repeat(tmp_path, {"loss/policy": 3e-8}, facts=facts)
