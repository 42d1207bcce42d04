"""Calls by vLLM's parsers, beneath the rules of our own: no raising, text stays text."""

import functools
import json

import pytest

from streamrl.environments.interface import CallOutcome, Reply
from streamrl.environments.tool_calls.call_formats import ShownCall, make_call_format
from streamrl.errors import ConfigError

pytestmark = pytest.mark.xdist_group("engines")
PROPERTIES = {"word": {"type": "string"}, "limit": {"type": "integer"}}
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["word"]},
    },
}

write_json = functools.partial(json.dumps, ensure_ascii=False)
WRITERS = {
    "qwen3_coder": lambda a: (
        "<tool_call>\n<function=look_up>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
    ),
    "llama3_json": lambda a: f'{{"name": "look_up", "parameters": {write_json(a)}}}',
    "mistral": lambda a: f"[TOOL_CALLS]look_up[ARGS]{write_json(a)}",
    "kimi_k2": lambda a: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
        f"<|tool_call_argument_begin|>{write_json(a)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
}
SHOWN = {"word": "x", "limit": 3}


@pytest.fixture
def make_format(marker_tokenizer):
    def make(name):
        shown = ShownCall(WRITERS[name](SHOWN), "look_up", SHOWN, LOOK_UP)
        return make_call_format(name, marker_tokenizer, shown=shown)

    return make


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_is_read_and_its_text_stays_text(make_format, encode, name):
    call_format = make_format(name)
    for word in ("x", 'say "hi", 7', "\u00fc \U0001f600", "a, b) and {c}"):
        arguments = {"word": word, "limit": 3}
        reply = call_format.parse(encode(f"{WRITERS[name](arguments)}<|im_end|>"), [LOOK_UP])
        (call,) = reply.calls
        assert (call.name, call.arguments, call.outcome) == ("look_up", arguments, CallOutcome.OK)
        assert reply.text == ""


@pytest.mark.parametrize("name", WRITERS)
def test_thoughts_and_cut_or_spelled_calls_are_text(make_format, encode, encode_chars, name):
    call_format, turn = make_format(name), WRITERS[name](SHOWN)
    thought = f"<think>{turn}</think>"
    assert call_format.parse(encode(thought + "No."), [LOOK_UP]).calls == ()
    assert len(call_format.parse(encode(thought + turn), [LOOK_UP]).calls) == 1
    assert call_format.parse(encode(turn)[:-2], [LOOK_UP], is_cut=True).calls == ()
    assert call_format.parse(encode(turn), []).calls == ()
    if name != "llama3_json":  # its calls have no marker
        assert call_format.parse(encode_chars(turn), [LOOK_UP]) == Reply(turn)


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_the_parser_does_not_read_is_malformed(make_format, encode, name):
    call_format, turn = make_format(name), WRITERS[name](SHOWN)
    known = encode(turn)
    for end in (len(known) // 3, len(known) // 2):
        reply = call_format.parse(known[:end], [LOOK_UP])
        assert {call.outcome for call in reply.calls} <= {
            CallOutcome.MALFORMED,
            CallOutcome.WRONG_ARGUMENTS,
            CallOutcome.UNKNOWN_TOOL,
        }
        assert reply.calls
    for step in (2, 3, 5):
        call_format.parse(known[::step] + known, [LOOK_UP])


def test_a_tokenizer_without_the_tokens_of_a_format_is_refused(plain_tokenizer):
    with pytest.raises(ConfigError, match=r"call_format=deepseek_v3: vLLM's parser refuses"):
        make_call_format("deepseek_v3", plain_tokenizer)
