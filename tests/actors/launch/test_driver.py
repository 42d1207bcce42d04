"""Which failures of an actor's loops restart it or end the run; how long a stop may take."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors.launch import driver
from streamrl.actors.launch.actor_registry import ActorRestarts
from streamrl.actors.launch.driver import STOP_TIMEOUT_S, RunSession, StopDeadline
from streamrl.actors.launch.elastic import PendingStarts
from streamrl.errors import (
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)
from streamrl.telemetry.progress import WorkStatus
from tests.virtual_time import ManualClock


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


SAVE_S = 1800.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def assert_ends(deadline: StopDeadline, clock: ManualClock, after_s: float, *, work: str = ""):
    clock.now += after_s - 0.1
    deadline.check()
    clock.now += 0.2
    with pytest.raises(DeadlineError, match=f"did not stop within {STOP_TIMEOUT_S:g} s{work}"):
        deadline.check()


def make_save(elapsed_s: float) -> WorkStatus:
    return WorkStatus("writing checkpoint 3", elapsed_s=elapsed_s, timeout_s=SAVE_S)


def test_only_a_stopping_run_has_a_deadline_which_other_work_does_not_extend(clock: ManualClock):
    deadline = StopDeadline(clock=clock)
    deadline.note_status(make_save(0.0))
    clock.now += 1e6
    deadline.check()
    deadline.start()
    clock.now += 5.0
    deadline.note_status(WorkStatus("evaluating version 3", 64, "prompts"))
    assert_ends(deadline, clock, STOP_TIMEOUT_S - 5.0)


def test_a_stop_waits_for_the_checkpoint_and_then_as_long_as_before(clock: ManualClock):
    deadline = StopDeadline(clock=clock)
    deadline.start()
    for elapsed_s in (2.0, 1000.0, 1700.0):
        deadline.note_status(make_save(elapsed_s))
        clock.now += SAVE_S - elapsed_s
        deadline.check()
    deadline.note_status(WorkStatus(""))
    assert_ends(deadline, clock, STOP_TIMEOUT_S)


def test_a_checkpoint_that_is_never_done_ends_a_stop(clock: ManualClock):
    deadline = StopDeadline(clock=clock)
    deadline.start()
    deadline.note_status(make_save(SAVE_S - 10.0))
    work = f" after {SAVE_S:g} s of writing checkpoint 3"
    assert_ends(deadline, clock, 10.0 + STOP_TIMEOUT_S, work=work)
