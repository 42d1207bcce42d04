"""In a worker: a user's function is loaded, called, and what it returns is read as judgements."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.interface.checks import format_value, to_finite_float
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult
from streamrl.rewards.user_code.user_function import (
    CallArguments,
    FunctionCallSpec,
    FunctionSource,
    UserFunction,
)

RewardRequest = tuple[Prompt, Sequence[str]]
"""None asks what the function needs."""
PASS_SCORE = 1.0
"""A number alone passes from here on."""
RESULT_KEYS = ("score", "acc", "pred", "answer")
"""Entries of a dict that have a meaning of their own."""
MAX_METRICS_PER_RESULT = 50
"""Further numbers of a dict that are kept: each is a metric."""


def make_reward_handler(source: FunctionSource) -> Callable[[RewardRequest | None], Any]:
    """What a worker answers with: judgements, or text where what came back is none."""
    user = source.load_function()

    def judge(request: RewardRequest | None) -> list[RewardResult] | FunctionCallSpec | str:
        if request is None:
            return user.call_spec
        calls = _build_calls(user, request)
        return _parse_results(
            user, [_call_function(user, arguments) for arguments in calls], request
        )

    async def judge_async(
        request: RewardRequest | None,
    ) -> list[RewardResult] | FunctionCallSpec | str:
        if request is None:
            return user.call_spec
        calls = [_await_function(user, arguments) for arguments in _build_calls(user, request)]
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return _parse_results(user, results, request)

    return judge_async if user.file_function.is_async else judge


def _build_calls(user: UserFunction, request: RewardRequest) -> list[CallArguments]:
    prompt, completions = request
    groups = [completions] if user.style.is_per_group else [[text] for text in completions]
    return [user.call_spec.build_arguments(prompt, group) for group in groups]


def _call_function(user: UserFunction, arguments: CallArguments) -> Any:
    try:
        return user.file_function.function(**arguments)
    # Whatever a user's function does wrong, exit() included.
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
    """Results as judgements; text that names the completion where one is nothing of the kind."""
    _, completions = request
    try:
        if user.style.is_per_group:
            results = _split_results(user, results[0], len(completions))
        return [_parse_result(user, result, i) for i, result in enumerate(results)]
    except RewardError as error:
        return str(error)
    # What is returned may be anything, and do anything when it is looked at.
    except BaseException as error:  # noqa: BLE001
        return str(user.to_reward_error(error))


def _split_results(user: UserFunction, results: Any, size: int) -> Sequence[Any]:
    if hasattr(results, "tolist"):  # an array, or a tensor
        results = results.tolist()
    if not isinstance(results, list | tuple) or len(results) != size:
        raise RewardError(f"{user} returned {format_value(results)}, not a list of {size} numbers")
    return results


def _parse_result(user: UserFunction, result: Any, place: int) -> RewardResult:
    """A number, or an object whose entry `score` is one.

    Of an object `acc` says whether it passes, and `pred` or `answer` what the answer is; further
    numbers are kept as they are, `acc` too.
    """
    if result is None and user.style.can_abstain:
        return RewardResult.make_not_judged()
    facts: Mapping[str, Any] = result if isinstance(result, dict) else {"score": result}
    score = to_finite_float(facts.get("score"))
    if score is None:
        raise RewardError(
            f"{user} returned {format_value(result)} for completion {place}, not a finite number"
        )
    passes = facts.get("acc", score >= PASS_SCORE)
    if not isinstance(passes, Real | np.bool_):
        raise RewardError(
            f"{user} returned {format_value(result)} for completion {place}: acc must be"
            f" true or false"
        )
    answer = facts.get("pred", facts.get("answer"))
    return RewardResult(
        score,
        RewardOutcome.PASS if passes else RewardOutcome.WRONG,
        # Of a class of the user's own only the characters are sent.
        answer=None if answer is None else "".join([str(answer), ""]),
        extra_metrics=_collect_extra_metrics(facts),
    )


def _collect_extra_metrics(facts: Mapping[Any, Any]) -> tuple[tuple[str, float], ...]:
    """What an object has besides, as far as it is finite numbers."""
    named = (
        (str(name), to_finite_float(value))
        for name, value in facts.items()
        if name not in RESULT_KEYS
    )
    found = [("".join([name]), number) for name, number in named if number is not None]
    acc = to_finite_float(facts.get("acc"))
    own = [] if acc is None else [("acc", acc)]
    return tuple([*own, *found][:MAX_METRICS_PER_RESULT])
