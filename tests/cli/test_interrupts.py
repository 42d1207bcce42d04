"""Signals that end a run."""

import contextlib
import signal
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
