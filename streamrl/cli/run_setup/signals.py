"""Ctrl-C and SIGTERM during a run: the first stops the run in order, the second aborts it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def catch_first_interrupt() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C or SIGTERM in the block instead of interrupting.

    Yields a function that returns whether a signal has arrived. A second signal raises
    KeyboardInterrupt. The previous handlers are restored at the end of the block.
    """
    received = 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            raise KeyboardInterrupt

    previous = {
        number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: received > 0
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interrupt_on_signals() -> Callable[[], None]:
    """Install handlers that raise KeyboardInterrupt on Ctrl-C and SIGTERM.

    Ray's own handlers would abort the process. Python swallows an exception raised inside a
    finalizer or a C callback, so the returned function raises KeyboardInterrupt again if a signal
    has arrived.
    """
    received = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        raise KeyboardInterrupt

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, receive)
    return check


@contextlib.contextmanager
def uninterrupted_exit_stack() -> Iterator[contextlib.ExitStack]:
    """Yield an ExitStack whose callbacks run with Ctrl-C and SIGTERM ignored."""
    with contextlib.ExitStack() as handlers, contextlib.ExitStack() as stack:
        try:
            yield stack
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
