"""Who gives no sign of life: asked when a run fails of a wait. Who waited knows only for whom, and
that one may itself be waiting for a process that is stopped."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from streamrl.errors import DeadlineError, DropError, GenerationError, WeightsError

ANSWER_S = 5.0
"""How long a process has to answer, s: it has nothing to do for it."""
WAITED = (DeadlineError, DropError, GenerationError, WeightsError)
"""Errors that may come of a process that does nothing any more."""


@contextmanager
def naming_silent(processes: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """What fails in here, and may have failed of a silent process, names it; see `silent`."""
    try:
        yield
    except WAITED as error:
        names = silent(processes())
        if not names:
            raise
        told = "; ".join(f"the process of {name} does not answer" for name in names)
        raise type(error)(f"{told}; {error}") from error


def silent(processes: Mapping[str, Any], within_s: float = ANSWER_S) -> list[str]:
    """The names of the processes that do not answer: stopped, or out of reach.

    Each value is an async actor in the process. One that waits for another answers, as its loop is
    free, and for one that has died Ray does.
    """
    replies = {actor.__ray_ready__.remote(): name for name, actor in processes.items()}
    _, late = ray.wait(list(replies), num_returns=len(replies), timeout=within_s)
    return sorted(replies[reply] for reply in late)
