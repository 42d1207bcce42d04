"""Processes started by a test, without runs of concurrent tests."""

import time

import psutil

from tests.e2e.launched import MARK


def descendants() -> set[psutil.Process]:
    """Return all descendants of this process, except marked runs and their descendants."""
    this_process, processes = psutil.Process(), set[psutil.Process]()
    for child in this_process.children():
        try:
            _wait_until_itself(child, this_process.cmdline())
            if MARK not in child.environ():
                processes |= {child, *child.children(recursive=True)}
        except psutil.Error:
            # The child has just exited.
            continue
    return processes


def _wait_until_itself(child: psutil.Process, command: list[str], within_s: float = 1.0) -> None:
    """Wait until a child has its own command line.

    Before its exec a child shows this process's command line and environment; during exec and exit
    it briefly shows none. A forked child without exec stays a copy: the wait ends after `within_s`.
    """
    deadline = time.monotonic() + within_s
    while child.cmdline() in (command, []) and time.monotonic() < deadline:
        time.sleep(0.001)
