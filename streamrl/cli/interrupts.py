"""Ctrl-C and SIGTERM while a run streams: the first asks it to stop, the second ends it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def graceful_interrupt() -> Iterator[Callable[[], bool]]:
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


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within the block signals wait: an orderly end is not to be cut short half way."""
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        yield
