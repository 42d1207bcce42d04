"""Progress of a command on standard error: on a terminal and elsewhere."""

import io
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from rich.console import Console

from streamrl.telemetry import progress
from streamrl.telemetry.progress import ProgressLine, WorkStatus
from tests.virtual_time import ManualClock

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE_CURSOR, SHOW_CURSOR, ERASE_LINE = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


class TerminalFile(io.StringIO):
    def isatty(self):
        return True


CLOCK = ManualClock()


@pytest.fixture(autouse=True)
def manual_clock(monkeypatch):
    CLOCK.now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=CLOCK))


def make_line(file, *, text="checking rows", total=None, unit="rows", mode="auto", **environ):
    """Return a line that no thread draws: tests set the clock and refresh."""
    console = Console(file=file, force_terminal=file.isatty() or None, width=80, _environ=environ)
    status = WorkStatus(text, total, unit)
    with mock.patch.object(progress, "Console", lambda **_: console):
        return ProgressLine(status, mode=mode)


def refresh_at(line, *times):
    for now in times:
        CLOCK.now = now
        line.refresh()


def last_frame(file):
    return ESCAPES.sub("", file.getvalue()).split("\r")[-1]


def test_work_of_less_than_two_seconds_writes_nothing_to_a_terminal():
    file = TerminalFile()
    line = make_line(file, total=100)
    refresh_at(line, 0.0, 1.0, 1.9)
    line.close()
    assert file.getvalue() == ""


def test_a_terminal_shows_a_bar_with_count_and_time_left():
    file = TerminalFile()
    line = make_line(file, total=4000)
    line.advance(1000)
    refresh_at(line, 1.0, 2.0)
    assert HIDE_CURSOR in file.getvalue()
    frame = last_frame(file)
    assert re.search(r"checking rows  \u2501+\S*  1,000 of 4,000 rows  0:06 left", frame)


def test_a_terminal_shows_the_elapsed_time_of_work_without_a_total():
    file = TerminalFile()
    line = make_line(file, text="searching", unit="placements")
    refresh_at(line, 5.0)
    assert last_frame(file).endswith("searching  0:05")
    line.advance(1234)
    refresh_at(line, 7.0)
    assert last_frame(file).endswith("searching  1,234 placements  0:07")


def test_closing_erases_the_line_and_restores_the_cursor():
    file = TerminalFile()
    line = make_line(file)
    refresh_at(line, 2.0)
    line.close()
    closed = file.getvalue()
    assert closed.endswith(f"{SHOW_CURSOR}\r\x1b[1A{ERASE_LINE}")
    line.close()
    refresh_at(line, 60.0)
    assert file.getvalue() == closed


def test_a_paused_line_is_hidden_and_due_again_two_seconds_later():
    file = TerminalFile()
    line = make_line(file)
    refresh_at(line, 2.0)
    with line.paused():
        hidden = file.getvalue()
        assert hidden.endswith(ERASE_LINE)
        refresh_at(line, 9.0)
    refresh_at(line, 10.9)
    assert file.getvalue() == hidden
    refresh_at(line, 11.0)
    assert "checking rows" in last_frame(file)


@pytest.mark.parametrize(
    ("file", "mode", "environ"),
    [
        (io.StringIO(), "auto", {}),
        (io.StringIO(), "live", {"FORCE_COLOR": "1"}),
        (TerminalFile(), "auto", {"TERM": "dumb"}),
        (TerminalFile(), "plain", {}),
    ],
)
def test_without_a_terminal_long_work_prints_plain_lines(file, mode, environ):
    line = make_line(file, total=400, mode=mode, **environ)
    refresh_at(line, 2.0, 9.9)
    assert file.getvalue() == ""
    line.advance(100)
    refresh_at(line, 10.0, 20.0, 39.9)
    line.describe("writing\x1b[2J files")
    refresh_at(line, 49.8, 49.9)
    line.close()
    assert file.getvalue().splitlines() == [
        "streamrl: checking rows: 100 of 400 rows, 0:30 left",
        "streamrl: writing\u241b[2J files, 0:10",
    ]


def test_only_printed_lines_go_to_standard_output(capsys, monkeypatch):
    file = TerminalFile()
    line = make_line(file)
    refresh_at(line, 2.0)
    line.print_line("result 1")
    assert last_frame(file).endswith("0:02")
    # A terminal that has both streams must not have a result on the line of the bar.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    line.print_line("result 2")
    assert file.getvalue().endswith(ERASE_LINE)
    assert capsys.readouterr() == ("result 1\nresult 2\n", "")
