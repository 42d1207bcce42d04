"""Time to open the page of a long run: `python -m benchmarks.run_page` prints one JSON object.

Writes the metrics of a run, then its page, and opens it in headless Chromium. `open_s` is the time
from the request until the charts in view are drawn and the page answers, `drawn_s` until all are.
For comparison, `plotly_s` opens a page that has only the plotting library and one chart of the same
number of points; `ratio` is the median of open_s over plotly_s, measured in turn.
"""

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from benchmarks.browser import open_browser, open_page
from benchmarks.command import (
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
)
from streamrl.telemetry.metric_names import METRICS, STALENESS_HISTOGRAM, Histogram
from streamrl.telemetry.page.page import RunPage, load_plotly_script
from streamrl.telemetry.page.run_record import RunReader
from streamrl.telemetry.sinks import JsonlSink

STAGES = ("generate", "reward", "reference", "train")
PLOTLY_PAGE = """<!doctype html><meta charset="utf-8"><div id="plot"></div>
<script>{script}</script>
<script>
Plotly.newPlot("plot", [{{ y: {values} }}]);
for (const mark of ["page ready", "charts drawn"]) performance.mark(mark);
document.body.dataset.drawn = "true";
</script>"""
MARKS = "['page ready', 'charts drawn'].map((m) => performance.getEntriesByName(m)[0].startTime)"


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("benchmarks.run_page", __doc__)
    parser.add_argument("--steps", type=at_least(2), default=10_000, help="steps of the run")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="times that it is opened")
    parser.set_quick(steps=300, rounds=1)
    return parser


def write_metrics(run_dir: Path, num_steps: int) -> None:
    """Write a run of `num_steps` steps with every metric, noise on each, and rare deaths."""
    rng = random.Random(0)
    (run_dir / "config.yaml").write_text("run: {name: long}\n", encoding="utf-8")
    now_s = 0.0
    sink = JsonlSink(run_dir, clock=lambda: now_s)
    sink.start({})
    fixed = [m.name for m in METRICS if not (m.is_pattern or m.has_episodes)]
    fixed += [f"idle/{stage}" for stage in STAGES] + [f"queue/depth/{s}" for s in STAGES[1:]]
    for step in range(1, num_steps + 1):
        now_s += 2.0
        row: dict[str, float | Histogram] = {name: rng.random() for name in fixed}
        row["time/step_s"] = 2.0
        row["reward/mean"] = 1 - math.exp(-step / num_steps) + 0.1 * rng.random()
        row |= {f"ledger/{name}": 48 * step for name in ("admitted", "trained")}
        row |= {f"ledger/{name}": 0 for name in ("filtered", "dropped", "in_flight")}
        row[STALENESS_HISTOGRAM] = Histogram((0, 1, 2, 3), (100, rng.randrange(50), 3))
        if step % 100 == 0:
            row["eval/pass_at_1"] = row["reward/mean"]
            sink.log_event("died", {"actor": f"generator-{step % 7}"})
        sink.log_step(step, row)
    sink.close({"outcome": "finished"})


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, open_browser() as browser:
        run_dir, file, peer = (Path(name) / part for part in ("long", "page.html", "plotly.html"))
        run_dir.mkdir()
        write_metrics(run_dir, arguments.steps)
        report_progress(f"metrics of {arguments.steps} steps written")
        started = time.perf_counter()
        html = RunPage([RunReader(run_dir)], lambda *_: []).render()
        render_s = time.perf_counter() - started
        file.write_text(html, encoding="utf-8")
        values = json.dumps([math.sin(i / 99) for i in range(arguments.steps)])
        page = PLOTLY_PAGE.format(script=load_plotly_script(), values=values)
        peer.write_text(page, encoding="utf-8")
        rounds = [
            (*time_opening(browser, file), time_opening(browser, peer)[0])
            for _ in range(arguments.rounds)
        ]
        report_progress("pages opened")
    open_s, drawn_s, plotly_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {
        "steps": arguments.steps,
        "page_mb": round(len(html.encode()) / 1e6, 2),
        "render_s": round(render_s, 3),
        "open_s": round(open_s, 3),
        "drawn_s": round(drawn_s, 3),
        "plotly_s": round(plotly_s, 3),
        "ratio": round(statistics.median(row[0] / row[2] for row in rounds), 2),
    }


def time_opening(browser: Browser, file: Path) -> tuple[float, float]:
    """Return the seconds from the request until the page is ready, and until all is drawn."""
    watched = open_page(browser, file.as_uri())
    ready_ms, drawn_ms = watched.page.evaluate(MARKS)
    watched.page.close()
    if watched.problems:
        raise BenchmarkError(f"{file.name}: {watched.problems[0]}")
    return ready_ms / 1e3, drawn_ms / 1e3


if __name__ == "__main__":
    run_benchmark(make_parser(), measure)
