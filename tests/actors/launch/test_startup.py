"""Who is on the way up, and for how long that may take."""

import pytest

from streamrl.actors.launch.startup import Starting
from streamrl.errors import DeadlineError


def test_each_actor_has_its_own_deadline_and_the_late_ones_are_named() -> None:
    now = 0.0
    starting = Starting(30.0, clock=lambda: now)
    starting.add("reply a", "generator-1")
    starting.add("reply b", "generator-0")
    assert starting.names == "generator-0, generator-1"
    now = 20.0
    starting.add("reply c", "reference-0")
    now = 30.0
    starting.check()
    now = 31.0
    with pytest.raises(DeadlineError, match=r"^generator-0, generator-1: not ready within 30 s$"):
        starting.check()
    assert (starting.pop("reply a"), starting.pop("reply b")) == ("generator-1", "generator-0")
    starting.check()
    assert list(starting) == ["reply c"]
    now = 51.0
    with pytest.raises(DeadlineError, match=r"^reference-0: not ready within 30 s$"):
        starting.check()
