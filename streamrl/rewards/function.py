"""Kind `function`: a user's own Python function, in any of the styles of user_function.py."""

import asyncio
import concurrent.futures
import contextlib
import reprlib
import threading
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.config import RewardConfig
from streamrl.rewards.user_function import Arguments, UserFunction, load_function

T = TypeVar("T")

#: Calls that may hang behind their deadline before no new one is started. A thread cannot be ended.
MAX_HUNG_CALLS = 16
_LARGEST = float(np.finfo(np.float32).max)


class FunctionReward:
    """Calls the function once per completion, or once per group where its style says so.

    A plain function runs in a thread of its own for each group, so it must be safe to run in
    several at once and cannot use signals; an async function runs on the event loop and must not
    block it. A result is a number (or bool), or an object whose entry `score` is one; what else is
    in the object is not read.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._user = load_function(config.path, config.function)
        self._hung: list[threading.Thread] = []

    def check(self, prompt: Prompt) -> None:
        """Raise RewardError if the function wants a column the prompt's row does not have."""
        self._user.arguments(prompt, [""])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """What the function says of each completion."""
        user = self._user
        groups = [completions] if user.style.per_group else [[text] for text in completions]
        calls = [user.arguments(prompt, group) for group in groups]
        run = self._run_async if user.is_async else self._run_in_thread
        results = await run(calls)
        if user.style.per_group:
            return _group_numbers(user, results[0], len(completions))
        return [_number(user, result, i) for i, result in enumerate(results)]

    async def _run_async(self, calls: Sequence[Arguments]) -> list[Any]:
        user = self._user

        async def call(arguments: Arguments) -> Any:
            try:
                return await user.function(**arguments)
            except (Exception, SystemExit) as error:
                raise user.error(error) from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call(arguments)) for arguments in calls]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _run_in_thread(self, calls: Sequence[Arguments]) -> list[Any]:
        user = self._user
        self._hung = [thread for thread in self._hung if thread.is_alive()]
        if len(self._hung) >= MAX_HUNG_CALLS:
            raise RewardError(f"{len(self._hung)} calls of {user.name} in {user.path} hang")
        thread, finished = _start(lambda: _call_all(user, calls))
        try:
            outcome = await asyncio.wrap_future(finished)
        except asyncio.CancelledError:
            self._hung.append(thread)
            raise
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome


def _call_all(user: UserFunction, calls: Sequence[Arguments]) -> list[Any] | RewardError:
    try:
        return [_call(user, arguments) for arguments in calls]
    except RewardError as error:
        return error


def _call(user: UserFunction, arguments: Arguments) -> Any:
    try:
        return user.function(**arguments)
    except (Exception, SystemExit) as error:
        raise user.error(error) from error


def _start(work: Callable[[], T]) -> tuple[threading.Thread, "concurrent.futures.Future[T]"]:
    """Run `work`, which must not raise, in a daemon thread.

    Not in an executor: interpreter exit waits for an executor's threads, hung ones included.
    """
    finished: concurrent.futures.Future[T] = concurrent.futures.Future()
    finished.set_running_or_notify_cancel()  # from here on a cancelled waiter leaves it alone
    thread = threading.Thread(target=lambda: finished.set_result(work()), daemon=True)
    thread.start()
    return thread, finished


def _group_numbers(user: UserFunction, results: Any, size: int) -> list[float]:
    if isinstance(results, np.ndarray):
        results = results.tolist()
    if not isinstance(results, list | tuple) or len(results) != size:
        raise RewardError(
            f"{user.name} in {user.path} returned {reprlib.repr(results)}, "
            f"not a list of {size} numbers"
        )
    return [_number(user, result, i) for i, result in enumerate(results)]


def _number(user: UserFunction, result: Any, place: int) -> float:
    value = result
    if isinstance(result, dict) and not user.style.per_group:
        value = result.get("score")
    if isinstance(value, Real | np.bool_):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            if abs(float(value)) <= _LARGEST:
                return float(value)
    raise RewardError(
        f"{user.name} in {user.path} returned {reprlib.repr(result)} for completion {place}, "
        "not a finite number"
    )
