"""Work that makes much and leaves no garbage: to look for some is a tenth to half of its time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Collector:
    """Python's collector of garbage, for those who do without it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._was_on = False

    @contextmanager
    def rests(self) -> Iterator[None]:
        """Nothing is collected until all that are in here, in whatever thread, are out."""
        with self._lock:
            if not self._users:
                self._was_on = gc.isenabled()
                gc.disable()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._was_on:
                    gc.enable()


uncollected = _Collector().rests
"""Around such work: `with uncollected(): ...`. Ends that overlap in time or lie in one another are
no matter."""
