"""Run directories for tests of the page, without a run."""

from pathlib import Path

import yaml

from streamrl.telemetry.metric_names import WAIT_METRICS, Histogram
from streamrl.telemetry.sinks import JsonlSink
from tests.telemetry.rows import full_row
from tests.virtual_time import ManualClock

START_S = 1_000_000.0
STEP_S = 2.0
CHARTS = [
    *("reward", "throughput", "lengths", "entropy", "probability", "kl", "grad_norm"),
    *("critic", "filter"),
    *("solved", "queue", "staleness", "idle"),
    *("step_time", "weights", "ledger", "events"),
]
"""Charts of such a run, in the order of the page."""


def write_run(folder: Path, *, num_steps: int = 6, is_closed: bool = True) -> Path:
    """Write a run of steps of STEP_S s each, with evaluations and a death."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"name": folder.name}}))
    clock = ManualClock(START_S)
    sink = JsonlSink(folder, clock=clock)
    sink.start({})
    sink.log_event("machine", {"cores": 2})
    sink.log_step(0, {"eval/mean_at_k": 0.1, "eval/pass_at_1": 0.1})
    for step in range(1, num_steps + 1):
        clock.now += STEP_S
        row = full_row(step) | dict.fromkeys(WAIT_METRICS, float("nan"))
        row |= {"eval/mean_at_k": 0.1 + 0.1 * step if step % 3 == 0 else float("nan")}
        row["staleness/histogram"] = Histogram((0, 1, 2, 3), (100, 10 * step, step))
        if step == 3:
            sink.log_event("died", {"actor": "generator-0", "reason": "<b>killed</b>"})
        sink.log_step(step, row)
    if is_closed:
        sink.close({"outcome": "finished"})
    return folder
