"""Work that makes much and leaves no garbage: to look for some is a tenth to half of its time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _GcPauser:
    """Python's collector of garbage, for those who do without it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_users = 0
        self._was_enabled = False

    @contextmanager
    def pause_gc(self) -> Iterator[None]:
        """Nothing is collected until all that are in here, in whatever thread, are out."""
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
"""Around such work: `with uncollected(): ...`. Ends that overlap in time or lie in one another are
no matter."""
