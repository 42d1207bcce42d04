"""How large a randomised test is: a budget in seconds, read here and nowhere else.

Every `@given` test draws examples until it has used its budget of processor time, or has drawn as
many as its settings allow. Cases of one parametrised test share its budget. Hypothesis chooses the
examples: the same ones each time where `CI` is set, new ones otherwise. Of a failure it prints the
arguments, and the line that repeats it.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings
from hypothesis.errors import UnsatisfiedAssumption

SECONDS = float(os.environ.get("STREAMRL_TEST_BUDGET", "1"))
"""Processor seconds for each randomised test."""
LEAST = 5
"""Examples that are drawn however long they take."""

# No deadline for one example: machines are of any speed.
settings.register_profile(
    "budget", deadline=None, max_examples=max(LEAST, round(100 * SECONDS)), print_blob=True
)
settings.load_profile("budget")


class BudgetUsedError(KeyboardInterrupt):
    """The end of a test that has passed so far. Hypothesis ends as if by Ctrl-C, and saves nothing.

    Returning early instead would cost a draw for each of the remaining examples.
    """


def within_budget(test: Callable[..., None], seconds: float) -> Callable[..., None]:
    """Make the body of a randomised test end its run once the budget is used.

    After a failure there is no end: Hypothesis looks for the simplest arguments that fail.
    """
    calls, has_failed, end_s = 0, False, time.process_time() + seconds
    least = LEAST + len(getattr(test, "hypothesis_explicit_examples", ()))

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        nonlocal calls, has_failed
        if calls >= least and time.process_time() > end_s and not has_failed:
            raise BudgetUsedError
        calls += 1
        try:
            test(*args, **kwargs)
        except UnsatisfiedAssumption:
            raise
        except (Exception, pytest.fail.Exception):
            has_failed = True
            raise

    return wrapped


class Budget:
    """The pytest plugin that gives every randomised test its budget."""

    def __init__(self) -> None:
        self._num_cases: Counter[object] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_cases = Counter(getattr(item, "obj", None) for item in session.items)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        function: Any = getattr(item, "obj", None)
        if not is_hypothesis_test(function):
            return (yield)
        body = function.hypothesis.inner_test
        function.hypothesis.inner_test = within_budget(body, SECONDS / self._num_cases[function])
        try:
            return (yield)
        except BudgetUsedError:
            return None
        finally:
            function.hypothesis.inner_test = body
