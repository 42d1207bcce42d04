"""Time budget of randomized tests, in seconds of processor time.

Every `@given` test draws examples until it has used its budget, or has drawn `max_examples`. Cases
of a parametrized test share its budget. Hypothesis draws the same examples in every run if `CI` is
set, new ones otherwise. For a failure it prints the arguments and a line that reproduces it.
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

SECONDS = float(os.environ.get("STREAMRL_TEST_BUDGET", "0.5"))
"""Processor seconds for each randomized test."""
LEAST = 5
"""Minimum number of examples, regardless of time."""

# No deadline for single examples: the speed of machines differs.
settings.register_profile(
    "budget", deadline=None, max_examples=max(LEAST, round(100 * SECONDS)), print_blob=True
)
settings.load_profile("budget")


class BudgetUsedError(KeyboardInterrupt):
    """End of a passing test, like Ctrl-C: Hypothesis stops at once and saves nothing.

    Returning early from the body would still draw each of the remaining examples.
    """


def within_budget(test: Callable[..., None], seconds: float) -> Callable[..., None]:
    """Wrap the body of a randomized test so that its run ends once the budget is used.

    After a failure the budget no longer applies: Hypothesis shrinks the arguments fully.
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
    """Pytest plugin that applies the budget to every randomized test."""

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
