"""Random policies depend on their seed only, and make the calls that they mean to make."""

import asyncio
import json
import random
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.interface import CallOutcome
from streamrl.environments.probing.environment_probe import (
    make_call_message,
    make_random_policy,
    sample_call,
)
from streamrl.environments.scripted.text_episode import parse_turn
from streamrl.environments.tool_calls.tool_schema import make_tool_schema


def search(
    query: str,
    tags: list[str],
    filters: dict[str, int],
    site: Literal["web", "news"],
    limit: int | None = None,
    exact: bool = False,
    weight: float = 1.0,
) -> str:
    """Search."""
    return query


TOOL = make_tool_schema(search)
SEEDS = st.integers(0, 2**32)


def find_outcome(seed, *, is_valid):
    call = sample_call(TOOL, random.Random(seed), is_valid=is_valid)
    (parsed,) = parse_turn(make_call_message([call]), [TOOL]).calls
    return parsed.outcome


@given(SEEDS)
def test_valid_random_calls_match_the_schema(seed):
    assert find_outcome(seed, is_valid=True) is CallOutcome.OK


def test_invalid_random_calls_have_every_fault_of_a_policy():
    outcomes = {find_outcome(seed, is_valid=False) for seed in range(50)}
    faults = (CallOutcome.MALFORMED, CallOutcome.UNKNOWN_TOOL, CallOutcome.WRONG_ARGUMENTS)
    assert outcomes == set(faults)


@given(SEEDS, st.integers(0, 9), st.sampled_from([[], [TOOL]]))
def test_the_same_seed_and_turn_give_the_same_random_turn(seed, num_messages, tools):
    turns: list[Any] = [
        asyncio.run(make_random_policy(seed)([{}] * num_messages, tools))  # type: ignore[arg-type]
        for _ in range(2)
    ]
    assert json.dumps(turns[0]) == json.dumps(turns[1])
