"""The page in headless Chromium: charts, hover, zoom, rollouts, a run that goes on."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.browser import WatchedPage, open_browser, open_page
from streamrl.telemetry.page.page import PageServer, RunPage
from streamrl.telemetry.page.run_record import RunReader
from streamrl.telemetry.rollout_log import (
    SAMPLED,
    RecordedGroup,
    RecordedRollout,
    RecordedTurn,
    RolloutLog,
)
from tests.telemetry.page.recorded_run import CHARTS, write_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]
ATTACK = "<img src=x onerror=\"document.title='attacked'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


def write_recorded_run(folder: Path) -> Path:
    """Write a run with a group of two rollouts in each of the steps 2 and 4."""
    write_run(folder)
    for step in (2, 4):
        turns = (RecordedTurn(SAMPLED, ATTACK, tokens=3),)
        rollouts = (
            RecordedRollout(ATTACK, 1.0, turns=turns),
            RecordedRollout("wrong", 0.0, turns=(RecordedTurn(SAMPLED, "wrong", tokens=1),)),
        )
        RolloutLog(folder).write_groups(step, [RecordedGroup(step, f"0:{step}:0", rollouts)])
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def file(run_dir: Path) -> Path:
    file = run_dir.parent / "page.html"
    file.write_text(RunPage([RunReader(run_dir)], lambda *_: ["bound by train"]).render())
    return file


@pytest.fixture
def watched(browser: Browser, file: Path) -> Iterator[WatchedPage]:
    watched = open_page(browser, file.as_uri())
    yield watched
    watched.page.close()
    assert watched.problems == []


def wait_until(page: Page, condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; Playwright's own waits would need a looser content policy."""
    for _ in range(200):
        if condition():
            return
        page.wait_for_timeout(50)
    pytest.fail(f"waited 10 s for {what}")


def plot_of(chart: str) -> str:
    return f'[data-chart="{chart}"] .plot'


def test_every_chart_is_drawn(browser: Browser, file: Path):
    watched = open_page(browser, file.as_uri(), is_dark=True)
    shown = watched.page.eval_on_selector_all(
        "[data-chart]", "boxes => boxes.map((box) => box.dataset.chart)"
    )
    assert set(shown) == set(CHARTS)
    for chart in shown:
        drawing = watched.page.locator(f"{plot_of(chart)} svg.main-svg").first
        box = drawing.bounding_box()
        assert box and box["width"] > 300 and box["height"] > 100, chart
        marks = watched.page.locator(f"{plot_of(chart)} :is(.trace, .hm image, .bars .point)")
        assert marks.count() > 0, chart
    assert watched.problems == []
    watched.page.close()


def test_charts_over_steps_zoom_together(watched: WatchedPage):
    page = watched.page
    box = page.locator(f"{plot_of('reward')} .nsewdrag").first.bounding_box()
    assert box
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    ranges = "(plot) => plot.layout.xaxis.range.map((end) => Math.round(end * 100))"
    zoomed = page.eval_on_selector(plot_of("reward"), ranges)
    assert zoomed[1] - zoomed[0] < 300

    def is_zoomed(chart: str) -> bool:
        return page.eval_on_selector(plot_of(chart), ranges) == zoomed

    for chart in ("queue", "staleness", "weights"):
        wait_until(page, partial(is_zoomed, chart), f"the zoom of {chart}")


def test_rollouts_can_be_paged_through_and_their_text_is_text(watched: WatchedPage):
    page = watched.page
    groups = page.locator("#groups")
    expect(groups).to_contain_text("0:4:0")
    expect(groups).to_contain_text(ATTACK)
    page.click("#earlier")
    expect(groups).to_contain_text("0:2:0")
    page.fill("#lowest", "0.5")
    expect(groups).to_contain_text(ATTACK)
    expect(groups.get_by_text("wrong", exact=True)).to_be_hidden()
    assert page.title() == "mine - streamrl"


def test_runs_are_overlaid_and_chosen(browser: Browser, run_dir: Path, tmp_path: Path):
    other = write_run(tmp_path / "other", num_steps=3)
    file = tmp_path / "both.html"
    file.write_text(RunPage([RunReader(run_dir), RunReader(other)], lambda *_: []).render())
    watched = open_page(browser, file.as_uri())
    names = "(plot) => plot.data.map((trace) => trace.name)"
    shown = watched.page.eval_on_selector(plot_of("reward"), names)
    assert any("mine" in name for name in shown) and any("other" in name for name in shown)
    watched.page.select_option("#run", "other")
    expect(watched.page.locator("#tiles")).to_contain_text("3")
    expect(watched.page.locator("#rollouts-note")).to_contain_text("no rollouts")
    assert watched.problems == []
    watched.page.close()


def test_a_served_page_follows_its_run(browser: Browser, tmp_path: Path):
    run_dir = write_recorded_run(tmp_path / "under_way")
    rows = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text("")
    server = PageServer(RunPage([RunReader(run_dir)], lambda *_: ["bound by train"]))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        watched = open_page(browser, server.address)
        expect(watched.page.locator("#groups")).to_contain_text("0:4:0")
        with (run_dir / "metrics.jsonl").open("a") as metrics:
            metrics.write(rows + '{"step": 7, "time": 1000014.0, "reward/mean": 0.7}\n')
        expect(watched.page.locator("#tiles .tile").first).to_have_text("7step", timeout=20_000)
        shown = watched.page.eval_on_selector_all(
            "#run-charts > *", "boxes => boxes.map((box) => box.dataset.chart)"
        )
        assert shown[:3] == ["queue", "staleness", "idle"] and shown[-1] == "events"
        assert watched.problems == []
        watched.page.close()
    finally:
        server.close()
        thread.join(10)
