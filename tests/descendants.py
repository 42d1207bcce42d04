"""What a test started itself, told from the runs that other tests play meanwhile."""

import time

import psutil

from tests.e2e.launched import MARK


def descendants() -> set[psutil.Process]:
    """Every process below this one, but for runs that were launched with a mark, and theirs."""
    own, found = psutil.Process(), set[psutil.Process]()
    for child in own.children():
        try:
            _wait_until_itself(child, own.cmdline())
            if MARK not in child.environ():
                found |= {child, *child.children(recursive=True)}
        except psutil.Error:
            # It ended just now.
            continue
    return found


def _wait_until_itself(child: psutil.Process, own: list[str], within_s: float = 1.0) -> None:
    """Up to its exec a child shows this process's command and environment; then, and as it ends,
    for a moment none.

    What stays a copy of this process is not waited for any longer.
    """
    deadline = time.monotonic() + within_s
    while child.cmdline() in (own, []) and time.monotonic() < deadline:
        time.sleep(0.001)
