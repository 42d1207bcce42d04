import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from streamrl.errors import ConfigError
from streamrl.telemetry import wandb_sink
from streamrl.telemetry.config import WandbConfig
from streamrl.telemetry.sinks import load_run_id
from streamrl.telemetry.wandb_sink import (
    MAX_TABLE_ROWS,
    MAX_TABLE_TEXT,
    WandbSink,
)
from tests.telemetry.recorded import make_group, make_guess
from tests.telemetry.rows import full_row
from tests.telemetry.wandb_file import read_wandb_file


@pytest.fixture(autouse=True)
def isolated_wandb(tmp_path, monkeypatch):
    """Isolate wandb from the user's settings and accounts, and end its service afterwards."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SERVICE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield
    import wandb

    wandb.teardown()


def started(run_dir, config=None, **options):
    sink = WandbSink(run_dir, config or WandbConfig(), run_name="demo", **options)
    sink.start({"seed": 7, "pipeline": {"max_staleness": 2}})
    return sink


def written(run_dir):
    """Return the contents of a run directory's wandb files, the oldest first."""
    paths = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    return [read_wandb_file(path) for path in sorted(paths, key=lambda p: p.stat().st_mtime_ns)]


def services():
    return [c for c in psutil.Process().children() if c.name() == "wandb-core"]


def test_an_offline_run_holds_every_metric_with_a_value_and_alerts(tmp_path):
    sink = started(tmp_path)
    assert len(services()) == 1
    for step in (1, 2, 3):
        sink.log_step(step, full_row(step) | {"loss/value": math.nan})
    sink.log_event("drop", {"cause": "timeout"})
    sink.log_event("stall", {"stage": "reward", "holder": "reward-0", "age_s": 301.5})
    sink.close({"steps": 3})
    assert services() == []
    (run,) = written(tmp_path)
    assert run.alerts == [("stall", "stage=reward, holder=reward-0, age_s=301.5")]
    assert [row["_step"] for row in run.rows] == [1, 2, 3]
    assert [row["reward/mean"] for row in run.rows] == pytest.approx([0.1, 0.2, 0.3])
    for row in run.rows:
        # A metric that the run does not have would get an empty panel.
        assert {n for n in row if not n.startswith("_")} == set(full_row(1)) - {"loss/value"}
        histogram = row["staleness/histogram"]
        assert (histogram["bins"], histogram["values"]) == ([0, 1, 2, 3], [100, 20, 3])
    assert run.summary["steps"] == 3
    assert run.config["pipeline"] == {"max_staleness": 2}
    assert run.run_name == "demo"


def test_a_resumed_run_keeps_its_id(tmp_path):
    assert load_run_id(tmp_path) is None
    started(tmp_path).close({})
    first = load_run_id(tmp_path)
    sink = started(tmp_path, resume_id=first)
    sink.log_step(4, {"reward/mean": 0.5})
    sink.close({})
    assert [run.run_id for run in written(tmp_path)] == [first, first]
    assert load_run_id(tmp_path) == first


def test_an_offline_program_makes_no_connection_whatever_the_environment_says(
    tmp_path, monkeypatch
):
    for name, value in (("MODE", "online"), ("API_KEY", "0" * 40), ("RUN_ID", "other")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    # wandb sends usage reports when the process ends, after all tests in this process.
    program = f"""
        import socket, sys
        from pathlib import Path
        from streamrl.telemetry.config import WandbConfig
        from streamrl.telemetry.wandb_sink import WandbSink

        def refuse(host, *args, **options):
            print("looked up", host, flush=True)
            raise OSError("no network")

        socket.getaddrinfo = refuse
        sink = WandbSink(Path({str(tmp_path)!r}), WandbConfig(), run_name="demo")
        sink.start({{}})
        sink.log_step(1, {{"reward/mean": 0.5}})
        sink.close({{}})
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout + process.stderr == ""
    (run,) = written(tmp_path)
    assert run.run_id == load_run_id(tmp_path) != "other"


def test_online_without_an_account_is_an_error_without_a_prompt(tmp_path):
    with pytest.raises(ConfigError, match=r"telemetry.wandb.mode=online: no wandb account"):
        started(tmp_path, WandbConfig(mode="online"))
    assert load_run_id(tmp_path) is None


def test_a_failed_wandb_start_names_the_disabling_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match=r"did not start.*telemetry.wandb.mode=disabled"):
        started(tmp_path)


def test_close_times_out_if_the_wandb_service_hangs(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(wandb_sink, "FINISH_TIMEOUT_S", 0.5)
    sink = started(tmp_path)
    services()[0].suspend()
    sink.close({})
    assert "did not finish within" in caplog.text
    assert services() == []


def test_a_run_survives_the_death_of_the_wandb_service(tmp_path, caplog):
    sink = started(tmp_path)
    service = services()[0]
    service.kill()
    service.wait(timeout=30)
    warning, step, deadline = "metrics now go to metrics.jsonl only", 0, time.monotonic() + 30
    while warning not in caplog.text:
        assert time.monotonic() < deadline
        step += 1
        sink.log_step(step, {"reward/mean": 0.5})
        time.sleep(0.01)  # wandb notices after a moment.
    for later in range(step + 1, step + 21):
        sink.log_step(later, {"reward/mean": 0.5})
        time.sleep(0.01)
    assert caplog.text.count(warning) == 1
    assert not any(
        record.exc_info for record in caplog.records if record.name.startswith("streamrl")
    )
    sink.close({})


@pytest.mark.parametrize("content", [b"../../x\n", b"\xff", None], ids=repr)
def test_an_invalid_run_id_is_an_error(tmp_path: Path, content: bytes | None):
    path = tmp_path / "wandb" / "run_id.txt"
    path.parent.mkdir()
    path.write_bytes(content) if content else os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"run_id\.txt: "):
        load_run_id(tmp_path)


def test_a_table_of_rollouts_is_logged_every_so_many_steps_under_the_latest(tmp_path):
    sink = started(tmp_path)
    text = "x" * (2 * MAX_TABLE_TEXT)
    for step in (9, 10, 11, 12):
        sink.log_step(step, full_row(step))
        rollouts = [make_guess(text, score=1.0)] * (MAX_TABLE_ROWS + 8)
        sink.log_rollouts(step - 1, [make_group(rollouts, step=step - 1)])
    sink.close({})
    (run,) = written(tmp_path)
    assert [row["_step"] for row in run.rows if "rollouts" in row] == [11]
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/rollouts_*.json")
    content = json.loads(table.read_text())
    assert len(content["data"]) == MAX_TABLE_ROWS
    row = dict(zip(content["columns"], content["data"][0], strict=True))
    assert (row["step"], row["uid"], row["score"], row["score/env"]) == (10, "0:1:0", 1.0, 1.0)
    assert ("Guess." in row["prompt"], row["version_min"], row["version_max"]) == (True, 3, 4)
    assert len(row["completion"]) <= MAX_TABLE_TEXT
    assert table.stat().st_size < 300_000
