"""Process-wide state of packages that draw from global random generators and print."""

import contextlib
import io
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_LOCK = threading.Lock()


class PrivateGlobals:
    """Global random generators of Python and numpy as a single session sees them.

    Sessions of a host process run in threads. Without states of their own, an episode would depend
    on the draws of those beside it.
    """

    def __init__(self, seed: int) -> None:
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Run a block alone among the sessions, with their own generators and without its prints.

        The wait for the other sessions is bounded by the deadline of the operation.
        """
        with _LOCK:
            shared = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(shared[0])
                np.random.set_state(shared[1])
