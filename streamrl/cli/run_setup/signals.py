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


class Interrupts:
    """Handlers that raise KeyboardInterrupt on Ctrl-C, SIGTERM and SIGHUP, and what they received.

    Python swallows an exception raised inside a finalizer or a C callback, and the library that
    was interrupted may fail with an error of its own; `check` and `preferred` raise the interrupt
    again. A process has one instance, `INTERRUPTS`, as it has one set of handlers.
    """

    def __init__(self) -> None:
        self._has_received = False

    def install(self) -> None:
        """Install the handlers; raise KeyboardInterrupt if a signal has arrived at earlier ones."""
        _install_handler(self._receive)
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has arrived."""
        if self._has_received:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def preferred(self) -> Iterator[None]:
        """Replace an error of the block by KeyboardInterrupt if a signal has arrived.

        The signal counts no more after the block: a notebook may start the next run.
        """
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            self._has_received = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_repeat = self._has_received and number == signal.SIGHUP
        self._has_received = True
        if not is_repeat:
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()


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
