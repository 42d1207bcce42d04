"""Recorded rows of the steps that a resumed run repeats: they stand, and the repeats must agree.

A repeated step trains the recorded micro-batches on the recorded columns, at any staleness. So all
that the trainers compute is known not to change, and a difference means that a file or the code
has changed since. Times, rates, the ledger and evaluations are today's, and not compared.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from streamrl.errors import RepeatedStepError
from streamrl.files.bounded_read import read_jsonl
from streamrl.telemetry.metric_names import MetricsRow, to_json_value
from streamrl.telemetry.sinks import METRICS_FILE

_REPEATED = ("loss/", "policy/", "critic/", "cost_critic/", "correction/", "dial/", "staleness/")
_REPEATED_NAMES = ("reward/mean", "reward/std", "cost/mean", "rollout/length_mean")
_ROUGHLY_REPEATED = ("reward/mean", "rollout/length_mean", "policy/entropy", "correction/kl")
"""Metrics that ranks, backends and processors with another order of sums change but little."""
ROUGH_TOLERANCE = 0.1
"""Difference allowed for _ROUGHLY_REPEATED, relative to the value, or to 0.1 for small ones."""
RATE = "policy/lr"


class RecordedRows:
    """Rows of metrics.jsonl after the checkpoint of a resumed run, by step.

    is_exact: the run repeats its steps on the same processors, in the same layout.
    """

    def __init__(self, run_dir: Path, *, after: int, is_exact: bool) -> None:
        rows = read_jsonl(run_dir / METRICS_FILE)
        self._rows = {row["step"]: row for row in rows if row["step"] > after}
        self._is_exact = is_exact
        self._run_dir = run_dir

    def check_repeat(self, step: int, row: MetricsRow) -> bool:
        """Return whether a repeated step has a recorded row; the repeat must agree with it.

        Raises RepeatedStepError with the first metric that differs. A step whose learning rate has
        been changed by hand, or the end of its schedule, is not compared.
        """
        recorded = self._rows.get(step)
        if recorded is None:
            return False
        values = {name: to_json_value(value) for name, value in row.items()}
        if values.get(RATE) != recorded.get(RATE):
            return True
        for name in recorded.keys() & values.keys() and values:
            if name in recorded and self._differs(name, recorded[name], values[name]):
                raise RepeatedStepError(
                    f"step {step}, repeated from the checkpoint, has {name} {values[name]!r}; its"
                    f" row in {self._run_dir / METRICS_FILE} has {recorded[name]!r}: the"
                    " checkpoint, a journal, the settings or the code has changed since. Nothing"
                    " was cut: --resume an older checkpoint, or remove the rows from this step on"
                    " to go on with the new numbers"
                )
        return True

    def _differs(self, name: str, recorded: object, value: object) -> bool:
        if self._is_exact:
            is_repeated = name.startswith(_REPEATED) or name in _REPEATED_NAMES
            return is_repeated and recorded != value
        if name not in _ROUGHLY_REPEATED:
            return False
        pair = isinstance(recorded, float | int) and isinstance(value, float | int)
        return pair and not math.isclose(
            recorded, value, rel_tol=ROUGH_TOLERANCE, abs_tol=ROUGH_TOLERANCE**2
        )
