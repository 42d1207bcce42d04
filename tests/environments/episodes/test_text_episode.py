"""Conversations without tokens, and tool calls as persons and functions write them."""

from typing import Any

import pytest

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.check_environment import (
    CALL_RULE,
    EpisodeRecord,
    parse_turn,
    play_text_episode,
    stay_silent,
)
from streamrl.environments.interface import CallOutcome, EnvironmentStep, ResetResult
from streamrl.environments.tool_calls.tool_schema import make_tool_schema
from streamrl.errors import EpisodeError
from streamrl.messages import FinishReason
from tests.environments.episodes.scripted import PROMPT, ScriptedSession, say
from tests.virtual_time import in_virtual_time


def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


TOOLS = [make_tool_schema(add)]


def parse(message, tools=TOOLS):
    return parse_turn(message, tools)


async def play(policy, steps, **settings):
    start = ResetResult([{"role": "user", "content": "go"}], TOOLS)
    session: Any = ScriptedSession(steps, start, final_score=0.5)
    config = EnvironmentConfig("mine.py", **settings)
    record = EpisodeRecord(PROMPT, "", 0)
    return await play_text_episode(config, session, PROMPT, policy, observer=record, timeout_s=10.0)


@in_virtual_time
async def test_a_policy_reads_the_conversation_and_its_own_turns():
    seen = []

    async def policy(messages, tools):
        seen.append(([message["content"] for message in messages], tools))
        return "so"

    end = await play(policy, [say("on", reward=0.25), EnvironmentStep(reward=1.0, done=True)])
    assert seen == [(["?\n\ngo"], TOOLS), (["?\n\ngo", "so", "on"], TOOLS)]
    assert end == (FinishReason.STOP, [0.25, 1.0], 0.5)


@in_virtual_time
async def test_limits_of_turns_and_time_end_an_episode_without_a_model():
    assert await play(stay_silent, [say("on")] * 3, max_turns=2) == (
        *(FinishReason.TURNS, [0.0, 0.0], 0.5),
    )
    slow = [say("on", reward=2.0), (60.0, say("late"))]
    assert await play(stay_silent, slow) == (FinishReason.TIMEOUT, [2.0], 2.0)


@in_virtual_time
async def test_an_observation_without_a_message_is_refused_as_by_a_models_renderer():
    with pytest.raises(EpisodeError, match="an observation needs a message"):
        await play(stay_silent, [EnvironmentStep()])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("add(a=1, b=2)", [("add", {"a": 1, "b": 2}, CallOutcome.OK)]),
        (" add (a=1), add(a=2)", [("add", {"a": n}, CallOutcome.OK) for n in (1, 2)]),
        ("add(a='1')", [("add", {"a": "1"}, CallOutcome.WRONG_ARGUMENTS)]),
        ("ad(a=1)", [("ad", {"a": 1}, CallOutcome.UNKNOWN_TOOL)]),
        ("add(a=1", [("", {}, CallOutcome.MALFORMED)]),
        ("add(a=1) is what I call", [("", {}, CallOutcome.MALFORMED)]),
        ("add(a=1)] + [", [("", {}, CallOutcome.MALFORMED)]),
        ("add(a=1)], [add(a=2)", [("", {}, CallOutcome.MALFORMED)]),
        ("add(1)", [("", {}, CallOutcome.MALFORMED)]),
        ("add(a=b)", [("", {}, CallOutcome.MALFORMED)]),
        ("(3)", []),
        ("the sum (3)", []),
    ],
)
def test_text_that_begins_as_a_call_is_a_tool_call(text, calls):
    reply = parse(text)
    assert [(call.name, call.arguments, call.outcome) for call in reply.calls] == calls
    is_kept = not calls or calls[0][2] is CallOutcome.MALFORMED
    assert not (calls and is_kept) or CALL_RULE in reply.calls[0].error
    assert reply.text == (text if is_kept else "")


def test_without_tools_every_turn_is_text():
    assert parse("add(a=1)", tools=[]).text == "add(a=1)"
