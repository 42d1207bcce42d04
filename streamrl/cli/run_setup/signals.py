"""Ctrl-C and SIGTERM while a run streams: the first asks it to stop, the second ends it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def catch_first_interrupt() -> Iterator[Callable[[], bool]]:
    """Within the block the first signal only sets what the yielded function returns.

    The second raises KeyboardInterrupt. The handlers that were there come back at the end.
    """
    received = 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received > 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_on_signals() -> Callable[[], None]:
    """From now on Ctrl-C and SIGTERM raise KeyboardInterrupt. Ray's own handlers would abort.

    Python drops what is raised inside a finalizer or a callback from C: the function that is
    returned raises it again, if there has been a signal.
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
    """A stack whose callbacks run with signals ignored: an orderly end is not cut short half way.

    The handlers that were there come back after it.
    """
    with contextlib.ExitStack() as before, contextlib.ExitStack() as stack:
        try:
            yield stack
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                before.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
