"""Signals that end a run."""

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from streamrl.cli.interrupts import interrupt_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the tests come back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_whose_exception_got_lost_is_not(number: int) -> None:
    check = interrupt_on_signals()
    check()
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        check()


def test_a_command_whose_output_is_closed_before_it_begins_ends_well() -> None:
    command = f"{shlex.quote(sys.executable)} -m streamrl.cli algorithms >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
