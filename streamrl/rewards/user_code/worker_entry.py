"""In a worker: a user's function is loaded, called, and what it returns is read as judgements."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from streamrl.errors import RewardError
from streamrl.messages import Prompt
from streamrl.rewards.interface.checks import finite, shown
from streamrl.rewards.interface.verdict import Judgement, Verdict
from streamrl.rewards.user_code.user_function import Arguments, Needs, Source, UserFunction

Request = tuple[Prompt, Sequence[str]]
"""None asks what the function needs."""
PASS_SCORE = 1.0
"""A number alone passes from here on."""
READ = ("score", "acc", "pred", "answer")
"""Entries of a dict that have a meaning of their own."""
MOST_NUMBERS = 50
"""Further numbers of a dict that are kept: each is a metric."""


def serve(source: Source) -> Callable[[Request | None], Any]:
    """What a worker answers with: judgements, or text where what came back is none."""
    user = source.load()

    def judge(request: Request | None) -> list[Judgement] | Needs | str:
        if request is None:
            return user.needs
        calls = _calls(user, request)
        return _read(user, [_call(user, arguments) for arguments in calls], request)

    async def judge_async(request: Request | None) -> list[Judgement] | Needs | str:
        if request is None:
            return user.needs
        calls = [_await(user, arguments) for arguments in _calls(user, request)]
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return _read(user, results, request)

    return judge_async if user.code.is_async else judge


def _calls(user: UserFunction, request: Request) -> list[Arguments]:
    prompt, completions = request
    groups = [completions] if user.style.per_group else [[text] for text in completions]
    return [user.needs.arguments(prompt, group) for group in groups]


def _call(user: UserFunction, arguments: Arguments) -> Any:
    try:
        return user.code.function(**arguments)
    # Whatever a user's function does wrong, exit() included.
    except BaseException as error:
        raise user.error(error) from error


async def _await(user: UserFunction, arguments: Arguments) -> Any:
    result: Awaitable[Any] = _call(user, arguments)
    try:
        return await result
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise user.error(error) from error


def _read(user: UserFunction, results: Sequence[Any], request: Request) -> list[Judgement] | str:
    """Results as judgements; text that names the completion where one is nothing of the kind."""
    _, completions = request
    try:
        if user.style.per_group:
            results = _per_completion(user, results[0], len(completions))
        return [_judgement(user, result, i) for i, result in enumerate(results)]
    except RewardError as error:
        return str(error)
    # What is returned may be anything, and do anything when it is looked at.
    except BaseException as error:  # noqa: BLE001
        return str(user.error(error))


def _per_completion(user: UserFunction, results: Any, size: int) -> Sequence[Any]:
    if hasattr(results, "tolist"):  # an array, or a tensor
        results = results.tolist()
    if not isinstance(results, list | tuple) or len(results) != size:
        raise RewardError(f"{user} returned {shown(results)}, not a list of {size} numbers")
    return results


def _judgement(user: UserFunction, result: Any, place: int) -> Judgement:
    """A number, or an object whose entry `score` is one.

    Of an object `acc` says whether it passes, and `pred` or `answer` what the answer is; further
    numbers are kept as they are, `acc` too.
    """
    if result is None and user.style.may_abstain:
        return Judgement.absent()
    facts: Mapping[str, Any] = result if isinstance(result, dict) else {"score": result}
    score = finite(facts.get("score"))
    if score is None:
        raise RewardError(
            f"{user} returned {shown(result)} for completion {place}, not a finite number"
        )
    passes = facts.get("acc", score >= PASS_SCORE)
    if not isinstance(passes, Real | np.bool_):
        raise RewardError(
            f"{user} returned {shown(result)} for completion {place}: acc must be true or false"
        )
    answer = facts.get("pred", facts.get("answer"))
    return Judgement(
        score,
        Verdict.PASS if passes else Verdict.WRONG,
        # Of a class of the user's own only the characters are sent.
        answer=None if answer is None else "".join([str(answer), ""]),
        numbers=_numbers(facts),
    )


def _numbers(facts: Mapping[Any, Any]) -> tuple[tuple[str, float], ...]:
    """What an object has besides, as far as it is finite numbers."""
    named = ((str(name), finite(value)) for name, value in facts.items() if name not in READ)
    found = [("".join([name]), number) for name, number in named if number is not None]
    acc = finite(facts.get("acc"))
    own = [] if acc is None else [("acc", acc)]
    return tuple([*own, *found][:MOST_NUMBERS])
