"""Worker side of user-defined rewards: load the function, call the function, parse results."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.interface.checks import format_value, to_finite_float
from streamrl.rewards.interface.reward_result import RewardOutcome, RewardResult
from streamrl.rewards.user_code.user_function import (
    CallArguments,
    FunctionCallSpec,
    FunctionSource,
    UserFunction,
)
from streamrl.stream.service_gate import Outage, is_outage

RewardRequest = tuple[Prompt, Sequence[str]]
RewardResponse = list[RewardResult] | FunctionCallSpec | Outage | str
PASS_SCORE = 1.0
"""Lowest score that passes if the result has no `acc`."""
RESULT_KEYS = ("score", "acc", "pred", "answer")
"""Reserved keys of a result dict; other keys with numbers become extra metrics."""
MAX_METRICS_PER_RESULT = 50


def make_reward_handler(source: FunctionSource) -> Callable[[RewardRequest | None], Any]:
    """Load the user's function; return the handler that calls the function in this worker.

    The handler maps (prompt, completions) to a list of results, to an error message if the function
    returned an invalid value, or to an Outage if it did not reach a service. The handler maps None
    to the FunctionCallSpec, and is async if the function is.
    """
    user = source.load_function()

    def judge(request: RewardRequest | None) -> RewardResponse:
        if request is None:
            return user.call_spec
        try:
            results = [_call_function(user, call) for call in _build_calls(user, request)]
        except RewardError as error:
            return _to_outage(user, error)
        return _parse_results(user, results, request)

    async def judge_async(request: RewardRequest | None) -> RewardResponse:
        if request is None:
            return user.call_spec
        calls = [_await_function(user, arguments) for arguments in _build_calls(user, request)]
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            results = await asyncio.gather(*tasks)
        except RewardError as error:
            return _to_outage(user, error)
        finally:
            for task in tasks:
                task.cancel()
        return _parse_results(user, results, request)

    return judge_async if user.file_function.is_async else judge


def _to_outage(user: UserFunction, error: RewardError) -> Outage:
    """Return an error as an outage if it is one, else raise it."""
    if not is_outage(error):
        raise error
    return Outage(str(user), str(error), down_s=0.0)


def _build_calls(user: UserFunction, request: RewardRequest) -> list[CallArguments]:
    prompt, completions = request
    groups = [completions] if user.style.is_per_group else [[text] for text in completions]
    return [user.call_spec.build_arguments(prompt, group) for group in groups]


def _call_function(user: UserFunction, arguments: CallArguments) -> Any:
    try:
        return user.file_function.function(**arguments)
    # User code may raise anything, SystemExit included.
    except BaseException as error:
        raise user.to_reward_error(error) from error


async def _await_function(user: UserFunction, arguments: CallArguments) -> Any:
    result: Awaitable[Any] = _call_function(user, arguments)
    try:
        return await result
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise user.to_reward_error(error) from error


def _parse_results(
    user: UserFunction, results: Sequence[Any], request: RewardRequest
) -> list[RewardResult] | str:
    """Convert returned values to results; return an error message for an invalid value."""
    _, completions = request
    try:
        if user.style.is_per_group:
            results = _split_results(user, results[0], len(completions))
        return [_parse_result(user, result, i) for i, result in enumerate(results)]
    except RewardError as error:
        return str(error)
    # The returned object is the user's: inspecting it may raise any exception.
    except BaseException as error:  # noqa: BLE001
        return str(user.to_reward_error(error))


def _split_results(user: UserFunction, results: Any, size: int) -> Sequence[Any]:
    if hasattr(results, "tolist"):  # numpy array or torch tensor
        results = results.tolist()
    if not isinstance(results, list | tuple) or len(results) != size:
        raise RewardError(f"{user} returned {format_value(results)}, not a list of {size} numbers")
    return results


def _parse_result(user: UserFunction, result: Any, index: int) -> RewardResult:
    """Convert the value returned for the completion at `index`: a number, or a dict with "score".

    Optional keys: `acc` is the pass flag, `pred` or `answer` the extracted answer.
    """
    if result is None and user.style.can_abstain:
        return RewardResult.make_not_judged()
    fields: Mapping[str, Any] = result if isinstance(result, dict) else {"score": result}
    score = to_finite_float(fields.get("score"))
    if score is None:
        raise RewardError(
            f"{user} returned {format_value(result)} for completion {index}, not a finite number"
        )
    passes = fields.get("acc", score >= PASS_SCORE)
    if not isinstance(passes, Real | np.bool_):
        raise RewardError(
            f"{user} returned {format_value(result)} for completion {index}: acc must be"
            f" true or false"
        )
    answer = fields.get("pred", fields.get("answer"))
    return RewardResult(
        score,
        RewardOutcome.PASS if passes else RewardOutcome.WRONG,
        # join() makes a plain str: the pool does not unpickle str subclasses of the user.
        answer=None if answer is None else "".join([str(answer), ""]),
        extra_metrics=_collect_extra_metrics(fields),
    )


def _collect_extra_metrics(fields: Mapping[Any, Any]) -> tuple[tuple[str, float], ...]:
    numbers = (
        (str(name), to_finite_float(value))
        for name, value in fields.items()
        if name not in RESULT_KEYS
    )
    metrics = [("".join([name]), number) for name, number in numbers if number is not None]
    acc = to_finite_float(fields.get("acc"))
    acc_metric = [] if acc is None else [("acc", acc)]
    return tuple([*acc_metric, *metrics][:MAX_METRICS_PER_RESULT])
