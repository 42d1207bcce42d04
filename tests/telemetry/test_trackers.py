"""TensorBoard and Trackio: what they hold of a run, read back with their own readers."""

import ast
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.errors import ConfigError
from streamrl.telemetry.config import TelemetryConfig, WandbConfig
from streamrl.telemetry.sink_group import make_sink_group
from streamrl.telemetry.tensorboard_sink import TensorboardSink
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


TRACKIO_RUN = """
import math, socket
from streamrl.telemetry.trackio_sink import TrackioSink
from tests.telemetry.rows import full_row

connect = socket.socket.connect
def connect_nearby(self, address):
    assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1"), address
    connect(self, address)
socket.socket.connect = connect_nearby
sink = TrackioSink("streamrl", run_name="demo", is_resumed=False)
sink.start({"pipeline": {"max_staleness": 2}})
for step in (1, 2, 3):
    sink.log_step(step, full_row(step) | {"loss/value": math.nan})
sink.log_event("died", {"actor": "generator-0"})
sink.close({})
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("streamrl", "demo")
print([(row["step"], row["reward/mean"], "loss/value" in row) for row in rows])
"""


def test_trackio_has_every_step_and_stays_on_this_machine(tmp_path: Path) -> None:
    # A process of its own: Trackio reads its folder from the environment when it is imported.
    upload = {"TRACKIO_SPACE_ID": "someone/space", "TRACKIO_SERVER_URL": "http://192.0.2.1"}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO_RUN],
        env={**os.environ, **upload, "TRACKIO_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The run's console is the only one that writes to the terminal.
    (printed,) = done.stdout.splitlines()
    rows = ast.literal_eval(printed)
    assert rows == [(step, pytest.approx(0.1 * step), False) for step in (1, 2, 3)]
    assert list(tmp_path.glob("*.db"))


def test_the_config_makes_the_sinks(tmp_path: Path) -> None:
    config = TelemetryConfig(
        sinks=["jsonl", "tensorboard"], wandb=WandbConfig(), console="none", trace=False
    )
    group = make_sink_group(config, make_run_info(tmp_path))
    assert [type(sink).__name__ for sink in group.sinks] == ["JsonlSink", "TensorboardSink"]


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
