"""Headless Chromium that opens pages of the project, for benchmarks, tests and pictures."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    Request,
    ViewportSize,
    sync_playwright,
)

from benchmarks.command import ROOT, BenchmarkError

CHROMIUM = ROOT / ".venv" / "chromium" / "chromium"
ARGUMENTS = (
    # Containers give Chromium's own sandbox no namespaces; it opens pages of this project only.
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WINDOW = ViewportSize(width=1400, height=900)
LOCAL_SCHEMES = ("file:", "data:", "blob:", "http://127.0.0.1:")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium, and close it at the end. Raises BenchmarkError if it does not start."""
    if not CHROMIUM.exists():
        raise BenchmarkError(f"no {CHROMIUM.relative_to(ROOT)}; install it with `make chromium`")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        except Error as error:
            raise BenchmarkError(f"Chromium did not start: {error.message}") from None
        with browser:
            yield browser


@dataclass
class WatchedPage:
    """Page of a browser, with what it did that it should not do.

    problems: errors of its scripts, warnings and errors on its console, requests that leave the
    machine.
    """

    page: Page
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("request", self._note_request)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith(LOCAL_SCHEMES):
            self.problems.append(f"request: {request.url}")


def open_page(browser: Browser, address: str, *, is_dark: bool = False) -> WatchedPage:
    """Open the run page in a new window; return when it has drawn all charts."""
    page = browser.new_page(viewport=WINDOW, color_scheme="dark" if is_dark else "light")
    watched = WatchedPage(page)
    watched.page.goto(address)
    watched.page.wait_for_selector("body[data-drawn]")
    return watched
