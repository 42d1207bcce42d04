"""Charts of the run page: Plotly takes them, and they show the run's numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from streamrl.telemetry.page.page import Chart, draw_run_charts, draw_shared_charts
from streamrl.telemetry.page.run_record import RunReader, RunRecord
from tests.telemetry.page.recorded_run import CHARTS, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return RunReader(write_run(tmp_path_factory.mktemp("runs") / "run")).read()


@pytest.fixture(scope="module")
def charts(run: RunRecord) -> dict[str, Chart]:
    drawn = [*draw_shared_charts([run]), *draw_run_charts(run)]
    return {chart.chart_id: chart for chart in drawn}


def test_a_run_has_every_chart_that_it_has_measurements_for(charts: dict[str, Chart]) -> None:
    assert list(charts) == CHARTS


def test_plotly_takes_every_chart(charts: dict[str, Chart]) -> None:
    for chart in charts.values():
        go.Figure(data=list(chart.traces), layout=dict(chart.layout))


def get_trace(chart: Chart, name: str) -> Any:
    (trace,) = (trace for trace in chart.traces if trace.get("name") == name)
    return trace


def test_the_charts_show_the_numbers_of_the_run(charts: dict[str, Chart], run: RunRecord) -> None:
    assert get_trace(charts["reward"], "reward")["y"] == pytest.approx(
        [0.1 * i for i in range(1, 7)]
    )
    assert get_trace(charts["reward"], "evaluation, mean_at_k")["x"] == [0, 3, 6]
    assert get_trace(charts["queue"], "train")["y"] == [step + 2 for step in range(1, 7)]
    heat = get_trace(charts["staleness"], "tokens")
    assert np.array(heat["z"])[:, 1] == pytest.approx([100 / 122, 20 / 122, 2 / 122], abs=1e-4)
    assert {trace["name"]: trace["y"][0] for trace in charts["idle"].traces} == {
        **{"generate": 0.0, "reward": 0.25, "reference": 0.5, "train": 0.75}
    }
    assert get_trace(charts["step_time"], "generate")["y"] == [2.0] * 6
    assert {trace["name"]: trace["y"][-1] for trace in charts["ledger"].traces} == {
        **{"trained": 10.0, "filtered": 2.0, "dropped": 1.0, "in flight": 7.0}
    }


def test_events_lie_at_their_step_and_cannot_write_markup(charts: dict[str, Chart]) -> None:
    (died,) = charts["events"].traces
    assert died["x"] == pytest.approx([3.0])
    assert died["text"] == ["died<br>actor: generator-0<br>reason: &lt;b&gt;killed&lt;/b&gt;"]


def test_charts_over_steps_mark_the_death_of_an_actor(charts: dict[str, Chart]) -> None:
    for chart in charts.values():
        (line,) = chart.layout["shapes"]
        assert line["x0"] == line["x1"] == pytest.approx(3.0), chart.chart_id


def test_resumes_and_interruptions_are_events() -> None:
    events = [
        {"time": 1.0, "event": "machine"},
        {"time": 2.0, "event": "close", "outcome": "interrupted"},
        {"time": 3.0, "event": "machine"},
        {"time": 4.0, "event": "close", "outcome": "finished"},
    ]
    run = RunRecord("mine", Path("mine"), "", [{"step": 1, "time": 4.0}], events)
    (chart,) = draw_run_charts(run)
    assert [trace["name"] for trace in chart.traces] == ["interrupted", "resumed"]


def test_several_runs_share_a_chart(tmp_path: Path) -> None:
    runs = [RunReader(write_run(tmp_path / name)).read() for name in ("first", "second")]
    reward, *_ = draw_shared_charts(runs)
    names = [trace["name"] for trace in reward.traces]
    assert "first: reward" in names
    assert "second: reward" in names
    colors = {trace["line"]["color"] for trace in reward.traces}
    assert len(colors) >= 2


def test_a_run_without_steps_has_no_charts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=0)
    run = RunReader(folder).read()
    assert draw_run_charts(run) == []
