"""Which failures of an actor's loops restart it, and which end the run."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors.launch import driver
from streamrl.actors.launch.actor_registry import ActorRestarts
from streamrl.actors.launch.driver import RunSession
from streamrl.actors.launch.elastic import PendingStarts
from streamrl.errors import (
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)


class FakeSession(RunSession):
    """Session over actors that restart at most twice; `restarted` has their names and reasons."""

    def __init__(self) -> None:
        self.crashed: list[str] = []
        self.restarted: list[tuple[str, str]] = []
        restarts = {"generator-0": ActorRestarts(lambda: "started", 2, "run.max_restarts")}
        self._registry: Any = SimpleNamespace(restarts=restarts, crash_actor=self.crashed.append)

    def _restart_actor(self, name: str, reason: str, handle: Any) -> None:
        self.restarted.append((name, reason))
        self._registry.restarts[name].restart()


@pytest.mark.parametrize("kind", [GenerationError, WeightsError])
def test_a_generator_with_a_hung_engine_is_restarted_until_its_restarts_are_used(
    kind: type[StreamError],
):
    session, error = FakeSession(), kind("no token was sampled for 600 s")
    for _ in range(2):
        session._replace_actor("generator-0", None, error, print)
    assert session.crashed == ["generator-0"] * 2
    assert session.restarted == [("generator-0", "no token was sampled for 600 s")] * 2
    ending = r"for 600 s; generator-0 was restarted 2 of 2 times \(run.max_restarts\)$"
    with pytest.raises(kind, match=ending):
        session._replace_actor("generator-0", None, error, print)


def test_an_actor_that_dies_at_every_start_ends_the_run_with_its_number_of_restarts(
    monkeypatch: pytest.MonkeyPatch,
):
    def fetch_dead_reply(reply: Any, name: str) -> Any:
        raise ActorLostError(f"{name}: the process died")

    monkeypatch.setattr(driver, "fetch_reply", fetch_dead_reply)
    session: Any = FakeSession()
    session._scaler, session._pending_starts = (), PendingStarts(60.0)
    session._pending_starts.add_actor("reply", "generator-0")
    ending = r"generator-0.start: the process died; generator-0 was restarted 2 of 2 times"
    with pytest.raises(ActorLostError, match=ending):
        session._handle_reply("reply", print)


def test_another_error_or_an_actor_without_restarts_ends_the_run():
    session = FakeSession()
    with pytest.raises(DeadlineError):
        session._replace_actor("generator-0", None, DeadlineError("late"), print)
    with pytest.raises(GenerationError):
        session._replace_actor("policy-0", None, GenerationError("hung"), print)
    assert not session.restarted
