"""Environment variables of this process, changed for a while."""

import contextlib
import os
from collections.abc import Iterator, Mapping

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries of numbers start no threads if this holds while they are imported."""


@contextlib.contextmanager
def changed_env(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and give them back the values that they had."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
