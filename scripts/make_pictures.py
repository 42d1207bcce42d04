"""Take the pictures of the docs from real runs: `make pictures`.

Trains two short runs with filter and evaluation, the first on a pseudo terminal, the second
without; takes pictures of both consoles, of the run page and of the built docs.
"""

import argparse
import html
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyte
from playwright.sync_api import Browser, Page

from benchmarks.browser import ROOT, open_browser, open_page
from streamrl.planner.calibration.advice import BottleneckText
from streamrl.telemetry.page.page import RunPage
from streamrl.telemetry.page.run_record import RunReader

PICTURES = ROOT / "docs" / "pictures"
SITE = ROOT / "build" / "pictured_docs"
CONFIG = "configs/dapo_arithmetic.yaml"
COLUMNS, LINES = 100, 34
PICTURED_STEP = 34
RUN_TIMEOUT_S = 900.0
TERMINAL_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #1b1d23; }}
pre {{ display: inline-block; margin: 0; padding: 14px 18px; color: #d6d8de;
       font: 14px/1.3 "DejaVu Sans Mono", monospace; }}
</style><pre>{text}</pre>"""
COLORS = {
    **{"default": "#d6d8de", "black": "#555", "red": "#f2777a", "green": "#99cc99"},
    **{"brown": "#ffcc66", "blue": "#6699cc", "magenta": "#cc99cc", "cyan": "#66cccc"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=PICTURES, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, open_browser() as browser:
        runs = Path(name)
        camera = Camera(browser, arguments.into)
        words = [f"run.dir={runs}", f"run.steps={arguments.steps}", "evaluation.every=10"]
        words.append("telemetry.rollouts.logprobs=true")
        screen = train_on_terminal([*words, "run.name=demo"], arguments.steps)
        camera.take_terminal("console.png", screen)
        train_plainly([*words, "run.name=slower", "trainer.lr=5.0e-5"])
        readers = [RunReader(runs / name) for name in ("demo", "slower")]
        camera.take_run_page(readers, runs / "page.html")
        camera.take_docs(SITE)


@dataclass
class Camera:
    """Takes pictures of pages into a folder."""

    browser: Browser
    folder: Path

    def take_terminal(self, name: str, lines: Iterable[str]) -> None:
        """Take a picture of lines of HTML as a terminal shows them."""
        page = self.browser.new_page(viewport={"width": 1200, "height": 900}, device_scale_factor=2)
        page.set_content(TERMINAL_PAGE.format(text="\n".join(lines)))
        page.locator("pre").screenshot(path=self.folder / name)
        page.close()

    def take_run_page(self, readers: list[RunReader], file: Path) -> None:
        """Take pictures of the page of runs: its charts, one run's charts, a group's rollouts."""
        file.write_text(RunPage(readers, BottleneckText()).render(), encoding="utf-8")
        watched = open_page(self.browser, file.as_uri())
        page = watched.page
        for name, start in (("page.png", "#tiles"), ("page_stages.png", '[data-chart="queue"]')):
            _scroll_to(page, start)
            page.screenshot(path=self.folder / name)
        # The policy is still uncertain, which the colors show.
        page.select_option("#step", "2")
        page.select_option("#mode", "logprob")
        _scroll_to(page, "#rollouts")
        page.screenshot(path=self.folder / "page_rollouts.png")
        page.close()

    def take_docs(self, folder: Path) -> None:
        """Take a picture of the first page of the built docs."""
        page = self.browser.new_page(viewport={"width": 1400, "height": 800})
        page.goto((folder / "docs" / "index.html").as_uri())
        page.screenshot(path=self.folder / "docs.png")
        page.close()


def _scroll_to(page: Page, selector: str) -> None:
    """Scroll an element to the top of the window, below the page's header."""
    page.eval_on_selector(
        selector,
        "(element) => scrollBy(0, element.getBoundingClientRect().top"
        " - document.querySelector('header').offsetHeight - 8)",
    )
    page.wait_for_timeout(300)


def list_words(words: list[str]) -> list[str]:
    return [str(ROOT / ".venv" / "bin" / "streamrl"), "train", CONFIG, *words]


def train_plainly(words: list[str]) -> None:
    """Train with output that is no terminal."""
    subprocess.run(
        list_words(words), cwd=ROOT, capture_output=True, timeout=RUN_TIMEOUT_S, check=True
    )


def train_on_terminal(words: list[str], num_steps: int) -> list[str]:
    """Train on a pseudo terminal; return its screen in the middle of a late step, as HTML lines."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    pictured: list[str] = []
    with _start_on_terminal(words) as (process, terminal):
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                output = os.read(terminal, 1 << 16)
            except OSError:  # the terminal's other end is closed
                break
            stream.feed(output)
            shown = re.search(rf"step\s+(\d+)/{num_steps}", "\n".join(screen.display))
            if shown and int(shown[1]) <= min(PICTURED_STEP, num_steps - 1):
                pictured = render_screen(screen)
        if process.wait(30) != 0:
            sys.exit(f"streamrl: the run failed: {' '.join(screen.display)}")
    return pictured


@contextmanager
def _start_on_terminal(words: list[str]) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    ours, theirs = pty.openpty()
    size = f'stty rows {LINES} columns {COLUMNS}; exec "$@"'
    process = subprocess.Popen(
        ["sh", "-c", size, "sh", *list_words(words)], cwd=ROOT, stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.terminate()
        process.wait(30)
        os.close(ours)


def render_screen(screen: pyte.Screen) -> list[str]:
    """Return the lines of a screen as HTML, without empty ones at its end."""
    lines = []
    for y in range(screen.lines):
        cells = [screen.buffer[y][x] for x in range(screen.columns)]
        lines.append("".join(map(_render_cell, cells)).rstrip())
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _render_cell(cell: pyte.screens.Char) -> str:
    text = html.escape(cell.data)
    if cell.fg == "default" and not cell.bold:
        return text
    color = COLORS.get(cell.fg) or (f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else "")
    style = f"color:{color};" * bool(color) + "font-weight:bold;" * cell.bold
    return f'<span style="{style}">{text}</span>'


if __name__ == "__main__":
    main()
