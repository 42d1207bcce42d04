"""Pending starts and their deadlines."""

import pytest

from streamrl.actors.launch.startup import PendingStarts
from streamrl.errors import DeadlineError


def test_each_start_has_its_own_deadline_and_late_actors_are_named() -> None:
    now = 0.0
    starting = PendingStarts(30.0, clock=lambda: now)
    starting.add_actor("reply a", "generator-1")
    starting.add_actor("reply b", "generator-0")
    assert starting.actor_names == "generator-0, generator-1"
    now = 20.0
    starting.add_actor("reply c", "reference-0")
    now = 30.0
    starting.raise_if_late()
    now = 31.0
    with pytest.raises(DeadlineError, match=r"^generator-0, generator-1: not ready within 30 s$"):
        starting.raise_if_late()
    assert (starting.pop_actor("reply a"), starting.pop_actor("reply b")) == (
        "generator-1",
        "generator-0",
    )
    starting.raise_if_late()
    assert list(starting) == ["reply c"]
    now = 51.0
    with pytest.raises(DeadlineError, match=r"^reference-0: not ready within 30 s$"):
        starting.raise_if_late()
