"""Files of a simulation have the format of a run's."""

import json
import math
from dataclasses import replace
from pathlib import Path

from streamrl.telemetry.metric_names import Histogram, find_missing_metrics, validate_row
from tests.planner.simulator.test_simulation import APART, TOGETHER, run


def test_rows_follow_the_metrics_contract():
    result = run(placement=replace(APART, max_staleness=1))
    for row in result.metrics_rows:
        validate_row(row)
        assert find_missing_metrics(row) == []
    last_row = result.metrics_rows[-1]
    assert last_row["time/step_s"] == 38.0 - 21.5
    assert last_row["staleness/mean"] == 0.4
    assert last_row["staleness/histogram"] == Histogram((0, 1, 2), (12, 8))
    assert last_row["throughput/tokens_per_s"] == 22 / 16.5
    assert (last_row["ledger/admitted"], last_row["ledger/trained"]) == (6, 6)
    assert last_row["rollout/truncated_frac"] == 1.0
    # Pulls from 21.5 to 28.5, and samples from 24.5 to 34.5.
    assert last_row["idle/generate"] == 1 - 13 / 16.5
    mean = last_row["reward/mean"]
    assert isinstance(mean, float) and math.isnan(mean)


def test_the_trace_has_the_format_of_a_run(tmp_path: Path):
    result = run(placement=replace(TOGETHER, max_staleness=1))
    result.write_run_files(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"run", "generator-0", "reward-0", "policy"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(result.spans)
    marks = [event["ts"] for event in events if event["ph"] == "i"]
    assert marks == [round(end * 1e6) for end in result.step_ends]
    lanes: dict[int, float] = {}
    for event in sorted(spans, key=lambda event: event["ts"]):
        assert event["ts"] >= lanes.get(event["tid"], 0.0), "spans of a lane overlap"
        lanes[event["tid"]] = event["ts"] + event["dur"]
