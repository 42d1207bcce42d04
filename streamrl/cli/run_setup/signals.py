"""Ctrl-C, SIGTERM and SIGHUP during a run: the first stops it in order, the second aborts it.

SIGHUP, of a closed terminal or a lost ssh connection, only ever counts as a first: a shell and the
kernel may both send it. A command that ignores SIGHUP from its start (nohup) runs on.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Callable, Iterator
from types import FrameType

_Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def catch_first_interrupt() -> Iterator[Callable[[], bool]]:
    """Record the first signal in the block instead of interrupting.

    Yields a function that returns whether a signal has arrived. A second Ctrl-C or SIGTERM raises
    KeyboardInterrupt. The previous handlers are restored at the end of the block.
    """
    has_received = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal has_received
        if has_received and number != signal.SIGHUP:
            raise KeyboardInterrupt
        has_received = True

    with contextlib.ExitStack() as previous:
        _install_handler(receive, previous)
        yield lambda: has_received


def interrupt_on_signals() -> Callable[[], None]:
    """Install handlers that raise KeyboardInterrupt on Ctrl-C, SIGTERM and SIGHUP.

    Ray's own handlers would abort the process. Python swallows an exception raised inside a
    finalizer or a C callback, so the returned function raises KeyboardInterrupt again if a signal
    has arrived.
    """
    has_received = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal has_received
        is_repeat, has_received = has_received and number == signal.SIGHUP, True
        if not is_repeat:
            raise KeyboardInterrupt

    def check() -> None:
        if has_received:
            raise KeyboardInterrupt

    _install_handler(receive)
    return check


@contextlib.contextmanager
def uninterrupted_exit_stack() -> Iterator[contextlib.ExitStack]:
    """Yield an ExitStack whose callbacks run with all these signals ignored.

    The shutdown of a run can therefore complete. The previous handlers are restored afterwards.
    """
    with contextlib.ExitStack() as previous, contextlib.ExitStack() as stack:
        try:
            yield stack
        finally:
            _install_handler(lambda number, frame: None, previous)


def _install_handler(receive: _Handler, previous: contextlib.ExitStack | None = None) -> None:
    """Install a handler of all signals that end a command; `previous` restores those before."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        receive(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        if number == signal.SIGHUP and before is signal.SIG_IGN:
            continue
        signal.signal(number, handle)
        if previous is not None:
            previous.callback(signal.signal, number, before)


def _leave_terminal() -> None:
    """Send output for a terminal to /dev/null: on a closed terminal each write would fail."""
    for file in (1, 2):
        if stat.S_ISCHR(os.fstat(file).st_mode):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, file)
            os.close(null)
