"""Pause Python's garbage collector during allocation-heavy work.

Collection would take 10 to 50 % of the time of such work and find nothing to free.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _GcPauser:
    """Counts the users that pause the collector, across threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_users = 0
        self._was_enabled = False

    @contextmanager
    def pause_gc(self) -> Iterator[None]:
        """Disable collection until every thread has left this context; nesting is allowed."""
        with self._lock:
            if not self._num_users:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users and self._was_enabled:
                    gc.enable()


pause_gc = _GcPauser().pause_gc
