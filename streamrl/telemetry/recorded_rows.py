"""Recorded rows of the steps that a resumed run repeats: they stand, and the repeats must agree.

A repeated step trains the recorded micro-batches on the recorded columns, at any staleness. So all
that the trainers compute is known not to change, and a difference means that a file or the code
has changed since. Times, rates, the ledger and evaluations are today's, and not compared.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from streamrl.errors import CheckpointError
from streamrl.files.bounded_read import read_jsonl
from streamrl.telemetry.metric_names import MetricsRow, to_json_value
from streamrl.telemetry.sinks import EVENTS_FILE, METRICS_FILE

_REPEATED = ("loss/", "policy/", "critic/", "cost_critic/", "correction/", "dial/", "staleness/")
_REPEATED_NAMES = ("reward/mean", "reward/std", "cost/mean", "rollout/length_mean")
_ROUGHLY_REPEATED = ("reward/mean", "rollout/length_mean", "policy/entropy", "correction/kl")
"""Metrics that ranks, backends and processors with another order of sums change but little."""
ROUGH_TOLERANCE, SMALL_DIFFERENCE = 0.1, 0.01
"""Differences allowed for _ROUGHLY_REPEATED: relative to the larger value, and in any case."""
RATE = "policy/lr"
START_EVENT, OBJECTIVE, GOES_BACK = "machine", "objective", "goes_back"
"""Event of each start of a run, its fact about the settings that decide what is learned, and
whether it returned to an older checkpoint: rows from before that have other successors now."""


class RecordedRows:
    """Rows of metrics.jsonl after the checkpoint of a resumed run, by step.

    after: version of the checkpoint. facts: those of this start, as its START_EVENT has them; a
    row of a start with other facts, or one computed on GPUs, may differ in rounding. A row with
    another OBJECTIVE is not compared.
    """

    def __init__(self, run_dir: Path, *, after: int, facts: Mapping[str, object]) -> None:
        self._path = run_dir / METRICS_FILE
        starts = [e for e in read_jsonl(run_dir / EVENTS_FILE) if e["event"] == START_EVENT]
        went_back = max((start["time"] for start in starts if start.get(GOES_BACK)), default=0.0)
        self._rows = {
            row["step"]: row
            for row in read_jsonl(self._path)
            if row["step"] > after and row["time"] > went_back
        }
        since = min((row["time"] for row in self._rows.values()), default=math.inf)
        first = max((i for i, e in enumerate(starts) if e["time"] <= since), default=0)
        known = [{name: start.get(name) for name in facts} for start in starts[first:]]
        self._is_exact = all(start == facts for start in known) and not facts["on_gpu"]
        self._is_comparable = all(start.get(OBJECTIVE) == facts[OBJECTIVE] for start in known)

    def check_repeat(self, step: int, row: MetricsRow) -> bool:
        """Return whether a repeated step has a recorded row; the repeat must agree with it.

        Raises CheckpointError with the first metric that differs. A step with another learning
        rate is not compared: run.steps changes the schedule.
        """
        recorded = self._rows.get(step)
        if recorded is None:
            return False
        values = {name: to_json_value(row[name]) for name in row if name in recorded}
        if not self._is_comparable or values.get(RATE) != recorded.get(RATE):
            return True
        for name, value in values.items():
            if self._differs(name, recorded[name], value):
                raise CheckpointError(
                    f"step {step}, repeated from the checkpoint, has {name} {value!r}, but its row"
                    f" in {self._path} has {recorded[name]!r}: the checkpoint, a journal or the"
                    " code has changed since; nothing was cut: --resume an older checkpoint, or"
                    f" remove the rows from step {step} on to accept the new numbers"
                )
        return True

    def _differs(self, name: str, recorded: object, value: object) -> bool:
        if self._is_exact:
            is_repeated = name.startswith(_REPEATED) or name in _REPEATED_NAMES
            return is_repeated and recorded != value
        if not isinstance(recorded, float | int) or not isinstance(value, float | int):
            return False
        is_close = math.isclose(recorded, value, rel_tol=ROUGH_TOLERANCE, abs_tol=SMALL_DIFFERENCE)
        return name in _ROUGHLY_REPEATED and not is_close
