"""Deadline of a run that was asked to stop."""

import math
import time
from collections.abc import Callable

from streamrl.errors import DeadlineError
from streamrl.telemetry.progress import SHOW_AFTER_S, WorkStatus

STOP_TIMEOUT_S = 12.0 + SHOW_AFTER_S
"""Longest time of an interrupted run to finish its micro-batch, and to end after its checkpoint.
Work is reported SHOW_AFTER_S after its start."""


class StopDeadline:
    """Time by which a run must have stopped; none before `start`.

    Work that announces a time of its own, such as writing a checkpoint, extends it meanwhile.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = math.inf
        self._reason = ""

    @property
    def is_running(self) -> bool:
        return self._end_s != math.inf

    def start(self) -> None:
        self._end_s = self._clock() + STOP_TIMEOUT_S
        self._reason = f"the run did not stop within {STOP_TIMEOUT_S:g} s"

    def note_status(self, status: WorkStatus) -> None:
        """Extend the deadline for work with a time of its own; count anew once work has ended."""
        if self.is_running and (status.timeout_s or not status.text):
            left_s = max(status.timeout_s - status.elapsed_s, 0.0)
            self._end_s = self._clock() + left_s + STOP_TIMEOUT_S
            work = f" after {status.timeout_s:g} s of {status.text}" if status.text else ""
            self._reason = f"the run did not stop within {STOP_TIMEOUT_S:g} s{work}"

    def check(self) -> None:
        """Raise DeadlineError if the deadline has passed."""
        if self._clock() > self._end_s:
            raise DeadlineError(self._reason)
