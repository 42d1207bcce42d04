"""Conversations as lines of JSON, and tool calls as persons and functions write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.interface import CallOutcome
from streamrl.environments.scripted.chat_lines import (
    ChatLineFormat,
    ChatLineRenderer,
    decode_conversation,
    decode_lines,
    encode_lines,
)
from streamrl.environments.tool_calls.tool_schema import make_tool_schema
from streamrl.errors import ConfigError


def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


TOOLS = [make_tool_schema(add)]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "tool"]),
            "content": st.text(st.characters()),
        }
    )
)


def parse(message, tools=TOOLS):
    return ChatLineFormat().parse(encode_lines([message]).tolist(), tools)


@given(MESSAGES)
def test_a_conversation_is_read_back_from_its_tokens(messages):
    assert decode_conversation(ChatLineRenderer().render_prompt(messages, TOOLS)) == (
        messages,
        TOOLS,
    )


def test_an_observation_is_one_line_per_message_and_not_trained():
    bridge = ChatLineRenderer().render_bridge(
        [], [{"role": "user", "content": "a\nb"}, {"role": "user", "content": ""}], is_cut=False
    )
    assert [message["content"] for message in decode_lines(bridge.token_ids)] == ["a\nb", ""]
    assert bridge.is_observation.all()


def test_an_observation_without_a_message_is_refused_as_by_a_models_renderer():
    with pytest.raises(ConfigError, match="an observation needs a message"):
        ChatLineRenderer().render_bridge([], [], is_cut=False)


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
        ("(3)", []),
        ("the sum (3)", []),
    ],
)
def test_text_that_begins_as_a_call_is_a_tool_call(text, calls):
    reply = parse({"content": text})
    assert [(call.name, call.arguments, call.outcome) for call in reply.calls] == calls
    is_kept = not calls or calls[0][2] is CallOutcome.MALFORMED
    assert reply.text == (text if is_kept else "")


def test_without_tools_every_turn_is_text():
    assert parse({"content": "add(a=1)"}, tools=[]).text == "add(a=1)"


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_tool_calls_of_a_message_take_arguments_as_object_or_json(arguments):
    reply = parse(
        {"content": "so", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    )
    assert (reply.text, reply.calls[0].arguments) == ("so", {"a": 1})
    assert reply.calls[0].outcome is CallOutcome.OK


@pytest.mark.parametrize("arguments", ["{", "[1]", None])
def test_a_message_with_arguments_that_are_no_object_has_a_malformed_call(arguments):
    reply = parse({"tool_calls": [{"function": {"name": "add", "arguments": arguments}}]})
    assert [call.outcome for call in reply.calls] == [CallOutcome.MALFORMED]
