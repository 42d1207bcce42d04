"""Ctrl-C and SIGTERM during a run: the first stops the run in order, the second aborts it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def catch_first_interrupt() -> Iterator[Callable[[], bool]]:
    """Record the first signal; yield a function that returns whether a signal arrived.

    A second signal raises KeyboardInterrupt. The previous handlers are restored at the end.
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
    """Raise KeyboardInterrupt on Ctrl-C and SIGTERM from now on; Ray's handlers would abort.

    Python swallows exceptions raised inside finalizers and C callbacks. The returned function
    raises KeyboardInterrupt again if a signal arrived.
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
    """Yield a stack whose callbacks run with signals ignored, so that shutdown completes.

    The previous handlers are restored afterwards.
    """
    with contextlib.ExitStack() as handlers, contextlib.ExitStack() as stack:
        try:
            yield stack
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
