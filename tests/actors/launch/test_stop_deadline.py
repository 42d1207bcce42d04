import pytest

from streamrl.actors.launch.driver import STOP_TIMEOUT_S, StopDeadline
from streamrl.errors import DeadlineError
from streamrl.telemetry.progress import WorkStatus

SAVE_S = 1800.0


class Stop:
    """A deadline on a clock that only the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.deadline = StopDeadline(clock=lambda: self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.deadline.check()

    def is_over_after(self, seconds: float, *, work: str = "") -> bool:
        self.wait(seconds - 0.1)
        with pytest.raises(DeadlineError) as caught:
            self.wait(0.2)
        assert f"did not stop within {STOP_TIMEOUT_S:g} s{work}" in str(caught.value)
        return True


def test_a_run_that_goes_on_has_no_deadline():
    stop = Stop()
    stop.deadline.note_status(WorkStatus("writing checkpoint 3", timeout_s=SAVE_S))
    stop.wait(1e6)


def test_work_without_a_time_of_its_own_does_not_extend_a_stop():
    stop = Stop()
    stop.deadline.start()
    stop.wait(5)
    stop.deadline.note_status(WorkStatus("evaluating version 3", 64, "prompts"))
    assert stop.is_over_after(STOP_TIMEOUT_S - 5)


def test_a_stop_waits_for_the_checkpoint_and_then_as_long_as_before():
    stop = Stop()
    stop.deadline.start()
    for elapsed_s in (2.0, 1000.0, 1700.0):
        stop.deadline.note_status(
            WorkStatus("writing checkpoint 3", elapsed_s=elapsed_s, timeout_s=SAVE_S)
        )
        stop.wait(SAVE_S - elapsed_s)
    stop.deadline.note_status(WorkStatus(""))
    assert stop.is_over_after(STOP_TIMEOUT_S)


def test_a_checkpoint_that_is_never_done_ends_a_stop():
    stop = Stop()
    stop.deadline.start()
    stop.deadline.note_status(
        WorkStatus("writing checkpoint 3", elapsed_s=SAVE_S - 10, timeout_s=SAVE_S)
    )
    work = f" after {SAVE_S:g} s of writing checkpoint 3"
    assert stop.is_over_after(10 + STOP_TIMEOUT_S, work=work)
