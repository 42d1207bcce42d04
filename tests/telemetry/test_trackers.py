"""TensorBoard: what it holds of a run, read back with its own reader."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.errors import ConfigError
from streamrl.telemetry.config import TelemetryConfig, WandbConfig
from streamrl.telemetry.sink_group import TensorboardSink, make_sink_group
from tests.telemetry.rows import full_row, make_run_info


def read_events(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def write_steps(sink: TensorboardSink, steps: range) -> None:
    sink.start({"pipeline": {"max_staleness": 2}})
    for step in steps:
        sink.log_step(step, full_row(step) | {"loss/value": math.nan})
    sink.log_event("died", {"actor": "generator-0"})
    sink.close({})


def test_tensorboard_has_every_metric_that_has_a_value(tmp_path: Path) -> None:
    write_steps(TensorboardSink(tmp_path), range(1, 4))
    events = read_events(tmp_path)
    names = set(full_row(1)) - {"loss/value", "staleness/histogram"}
    assert set(events.Tags()["scalars"]) == names
    rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert rewards == [(step, pytest.approx(0.1 * step)) for step in (1, 2, 3)]
    histogram = events.Histograms("staleness/histogram")[-1].histogram_value
    assert (histogram.num, list(histogram.bucket)[-3:]) == (123, [100, 20, 3])
    (died,) = events.Tensors("events/died/text_summary")
    assert b"generator-0" in died.tensor_proto.string_val[0]


def test_tensorboard_of_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    write_steps(TensorboardSink(tmp_path), range(1, 4))
    write_steps(TensorboardSink(tmp_path, is_resumed=True), range(3, 5))
    steps = [event.step for event in read_events(tmp_path).Scalars("reward/mean")]
    assert steps == [1, 2, 3, 4]


def test_the_config_makes_the_sinks(tmp_path: Path) -> None:
    config = TelemetryConfig(sinks=["jsonl", "tensorboard"], wandb=WandbConfig(), console="none")
    group = make_sink_group(config, make_run_info(tmp_path))
    names = [type(sink).__name__ for sink in group.sinks]
    assert names == ["JsonlSink", "TensorboardSink", "TraceSink"]


@pytest.mark.parametrize(
    ("sinks", "problem"),
    [
        (
            ["jsonl", "tensorbord"],
            "telemetry.sinks=tensorbord: no such sink; the nearest sink is tensorboard",
        ),
        (["wandb"], "telemetry.sinks=wandb: must contain jsonl"),
        ([], "must contain jsonl"),
    ],
)
def test_wrong_sinks_are_refused(sinks: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TelemetryConfig(sinks=sinks)
