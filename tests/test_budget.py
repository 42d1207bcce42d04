"""Budget of randomized tests: no draws after it is used, and full shrinking of failures."""

import contextlib
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import LEAST, BudgetUsedError, within_budget

Seen = list[int]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Collect the numbers drawn by a test; each takes a second of processor time."""
    numbers: Seen = []
    monkeypatch.setattr(time, "process_time", lambda: float(len(numbers)))
    return numbers


def run(body: Callable[..., None], seconds: float = 0.5) -> None:
    """Run a body that draws a number as pytest runs a randomized test."""
    with contextlib.suppress(BudgetUsedError):
        given(number=st.integers(0))(within_budget(body, seconds))()


@pytest.mark.parametrize(("seconds", "draws"), [(0.5, LEAST), (10.0, 11), (10.5, 11)])
def test_a_randomized_test_stops_drawing_once_its_budget_is_used(
    drawn: Seen, seconds: float, draws: int
):
    def body(number: int) -> None:
        drawn.append(number)

    run(body, seconds)
    assert len(drawn) == draws


def test_a_failure_is_fully_shrunk_despite_the_budget(drawn: Seen):
    def body(number: int) -> None:
        drawn.append(number)
        assert number == -1

    with pytest.raises(AssertionError):
        run(body)
    assert drawn[-1] == 0
