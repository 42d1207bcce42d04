"""Parsing of sampled turns: families' formats, markers by token id, outcomes, cut turns."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.environments.interface import CallOutcome, Reply
from streamrl.environments.tool_calls import call_formats
from streamrl.environments.tool_calls.call_formats import (
    MAX_SPANS,
    OWN_FORMATS,
    make_assistant_message,
    make_call_format,
)
from streamrl.environments.tool_calls.marked_turn import THINK_END
from streamrl.errors import ConfigError

PATTERN = r"<<(?P<name>\w+) (?P<arguments>.*?)>>"

MARKED_FORMATS = [*OWN_FORMATS, "regex"]


def make_tool(name, properties=None):
    parameters: dict[str, Any] = {"type": "object"}
    if properties is not None:
        parameters |= {
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = make_tool("add", {"a": {"type": "integer"}, "b": {"type": "integer"}})
SAY = make_tool("say", {"text": {"type": "string"}})
TOOLS = [ADD, SAY, make_tool("any")]


@pytest.fixture(scope="session")
def parse(marker_tokenizer, encode):
    """Parse a turn in a format; in a text, markers become their tokens."""

    def parse_turn(name, turn, tools=TOOLS, *, pattern=PATTERN, **options):
        token_ids = encode(turn) if isinstance(turn, str) else turn
        call_format = make_call_format(name, marker_tokenizer, pattern=pattern)
        return call_format.parse(token_ids, tools, **options)

    return parse_turn


def describe(reply):
    assert all(call.outcome is CallOutcome.OK for call in reply.calls), reply.calls
    return reply.text, [(call.name, dict(call.arguments)) for call in reply.calls]


SUM = ("add", {"a": 1, "b": 2})
HI = ("say", {"text": "hi"})
SUM_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
HI_JSON = '{"name": "say", "arguments": {"text": "hi"}}'
SUM_CALL, HI_CALL = (f"<tool_call>{text}</tool_call>" for text in (SUM_JSON, HI_JSON))
TO_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'
THOUGHT = "<|channel|>analysis<|message|>add 1 and 2?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("name", "turn", "text", "calls"),
    [
        ("hermes", f"<tool_call>\n{SUM_JSON}\n</tool_call>", "", [SUM]),
        ("hermes", f"{SUM_CALL}\n{HI_CALL}", "", [SUM, HI]),
        ("hermes", f"I add.\n{SUM_CALL}\nDone.", "I add.\nDone.", [SUM]),
        (
            "hermes",
            f"<think>{SUM_CALL}</think>\n{HI_CALL}",
            f"<think>{SUM_CALL}</think>",
            [HI],
        ),
        ("hermes", "The sum<|call|> is 3.<|im_end|>", "The sum is 3.", []),
        (
            "hermes",
            HI_CALL.replace("hi", "a<|call|>b</tool_call>"),
            "",
            [("say", {"text": "a<|call|>b</tool_call>"})],
        ),
        ("harmony", f"{THOUGHT}{TO_ADD}<|call|>", "", [SUM]),
        ("harmony", f"{THOUGHT}{TO_ADD}", "", [SUM]),
        ("harmony", f"{THOUGHT}<|channel|>final<|message|>It is 3.<|return|>", "It is 3.", []),
        (
            "harmony",
            f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{TO_ADD}<|call|>",
            "I add.",
            [SUM],
        ),
        ("regex", '<<add {"a": 1, "b": 2}>> then <<say {"text": "hi"}>>', "then", [SUM, HI]),
    ],
)
def test_calls_in_the_format_of_a_family_are_parsed(parse, name, turn, text, calls):
    assert describe(parse(name, turn)) == (text, calls)


@pytest.mark.parametrize(
    ("name", "turn", "error"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "character"),
        ("hermes", f"<tool_call>{SUM_JSON}", "expected </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "key name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "key arguments"),
        (
            "hermes",
            '<tool_call>{"name": "any", "arguments": {"a": 1, "a": 2}}</tool_call>',
            "must occur only once",
        ),
        (
            "hermes",
            '<tool_call>{"name": "any", "arguments": {"a": "\\ud800"}}</tool_call>',
            "surrogate",
        ),
        (
            "hermes",
            '<tool_call>{"name": "any", "arguments": {"a": ' + "[" * 5000 + "</tool_call>",
            "nested",
        ),
        ("harmony", f"{TO_ADD} or so<|call|>", "expected the end of the message"),
        ("regex", "<<add 1>>", "JSON object with the arguments"),
    ],
)
def test_a_call_that_cannot_be_parsed_is_malformed_and_stays_in_the_text(parse, name, turn, error):
    reply = parse(name, turn)
    (call,) = reply.calls
    assert call.outcome is CallOutcome.MALFORMED
    assert error in call.error
    assert call.arguments == {}
    assert "\n" not in call.error
    assert reply.text == turn


def test_a_special_token_repairs_no_call_and_a_call_after_a_malformed_one_is_made(parse):
    (call,) = parse("hermes", SUM_CALL.replace(":", ":<|call|>")).calls
    assert call.outcome is CallOutcome.MALFORMED
    reply = parse("hermes", f'<tool_call>{{"name": "add{SUM_CALL}')
    assert [call.outcome for call in reply.calls] == [CallOutcome.MALFORMED, CallOutcome.OK]


def test_unknown_tools_and_wrong_arguments_are_told_apart(parse):
    written = [{"a": 1}, {"a": "1", "b": 2}, {"a": 1, "b": 2, "c": 3}]
    made = [("ad", {"a": 1, "b": 2}), *(("add", arguments) for arguments in written)]
    objects = [json.dumps({"name": name, "arguments": entry}) for name, entry in made]
    calls = parse("hermes", "".join(f"<tool_call>{text}</tool_call>" for text in objects)).calls
    wrong = CallOutcome.WRONG_ARGUMENTS
    assert [call.outcome for call in calls] == [CallOutcome.UNKNOWN_TOOL, wrong, wrong, wrong]
    assert [call.error for call in calls] == [
        "unknown tool 'ad'; the nearest tool is add",
        "wrong arguments for add: 'b' is a required property",
        "wrong arguments for add: a: '1' is not of type 'integer'",
        "wrong arguments for add: Additional properties are not allowed ('c' was unexpected)",
    ]
    assert calls[2].arguments == {"a": "1", "b": 2}


def test_a_marker_that_is_no_token_is_found_by_its_spelling(plain_tokenizer):
    call_format = make_call_format("hermes", plain_tokenizer)
    reply = call_format.parse(plain_tokenizer.encode(f"I add.{SUM_CALL}"), TOOLS)
    assert describe(reply) == ("I add.", [SUM])


CUT_TURNS = {
    "hermes": SUM_CALL,
    "harmony": f"{TO_ADD}<|call|>",
    "regex": '<<add {"a": 1, "b": 2}>>',
}


@pytest.mark.parametrize("name", MARKED_FORMATS)
def test_a_call_cut_by_the_length_limit_is_text_and_not_malformed(parse, encode, name):
    token_ids = encode(CUT_TURNS[name])
    assert len(parse(name, token_ids, is_cut=True).calls) == 1
    for length in range(len(token_ids)):
        reply = parse(name, token_ids[:length], is_cut=True)
        assert reply.is_cut
        assert not reply.calls
        if name != "harmony":  # its headers are no text
            assert CUT_TURNS[name].startswith(reply.text)


MARKER_TEXTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|call|>", "<|python_end|>", '"', "'", "\\"]
)
# What comes before the end of thinking is no call, even if the end is quoted in an argument.
STRINGS = (
    st.text() | st.lists(MARKER_TEXTS | st.text(max_size=3), max_size=5).map("".join)
).filter(lambda text: THINK_END not in text)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(STRINGS, VALUES, max_size=4)
JSON_WRITERS = {
    "hermes": lambda a, x: (
        f"<tool_call>\n{json.dumps({'name': 'any', 'arguments': a}, ensure_ascii=x)}\n</tool_call>"
    ),
    "harmony": lambda a, x: (
        f"<|channel|>commentary to=functions.any <|constrain|>json<|message|>"
        f"{json.dumps(a, ensure_ascii=x)}<|call|>"
    ),
}


@pytest.mark.parametrize("name", JSON_WRITERS)
@given(arguments=ARGUMENTS, is_ascii=st.booleans())
def test_any_arguments_written_in_json_come_back(parse, name, arguments, is_ascii):
    reply = parse(name, JSON_WRITERS[name](arguments, is_ascii))
    assert describe(reply) == ("", [("any", arguments)])


@pytest.mark.parametrize("name", MARKED_FORMATS)
@given(text=st.text() | STRINGS)
@example(SUM_CALL)
@example(f"{THOUGHT}{TO_ADD}<|call|>")
def test_text_without_markers_or_with_spelled_ones_comes_back_unchanged(
    parse, encode_chars, name, text
):
    for is_cut in (False, True):
        assert parse(name, encode_chars(text), is_cut=is_cut) == Reply(text, is_cut=is_cut)


@pytest.mark.parametrize("name", MARKED_FORMATS)
@given(data=st.data(), is_cut=st.booleans())
def test_a_garbled_turn_never_raises(parse, marker_tokenizer, encode, name, data, is_cut):
    known = st.sampled_from(encode(CUT_TURNS[name] + TO_ADD))
    any_token = st.integers(0, len(marker_tokenizer) - 1)
    reply = parse(name, data.draw(st.lists(known | any_token, max_size=40)), is_cut=is_cut)
    for call in reply.calls:
        assert bool(call.error) == (call.outcome is not CallOutcome.OK)
    reply.text.encode()
    json.dumps(make_assistant_message(reply)).encode()


def test_a_repeated_marker_makes_a_bounded_number_of_calls(parse, encode):
    assert len(parse("hermes", encode("<tool_call>") * 5000).calls) == MAX_SPANS


def test_text_arguments_take_the_types_of_the_schema(parse):
    properties = {
        "flag": {"type": "boolean"},
        "text": {"type": "string"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "anything": {},
    }
    values = {"flag": "True", "text": "12", "limit": "null", "note": "12", "anything": "[1]"}
    pattern = "".join(rf"{name}=(?P<{name}>\S+) ?" for name in values)
    turn = " ".join(f"{name}={value}" for name, value in values.items())
    (call,) = parse("regex", turn, [make_tool("set", properties)], pattern=pattern).calls
    expected = {"flag": True, "text": "12", "limit": None, "note": "12", "anything": [1]}
    assert call.arguments == expected
    assert call.outcome is CallOutcome.OK


ADDITION = r"\((?P<a>-?\d+)\+(?P<b>[^)]*)\)"


def test_a_pattern_without_name_calls_the_only_tool(parse):
    reply = parse("regex", "so (1+2) and (3+4)", [ADD], pattern=ADDITION)
    assert describe(reply) == ("so\nand", [SUM, ("add", {"a": 3, "b": 4})])
    (call,) = parse("regex", "(1+x)", [ADD], pattern=ADDITION).calls
    assert call.outcome is CallOutcome.WRONG_ARGUMENTS


@pytest.mark.parametrize(
    ("pattern", "tools", "error"),
    [
        (ADDITION, [ADD, SAY], "must have one tool"),
        (r"(?P<first>\d)\+(?P<b>\d)", [ADD], "must be its arguments, not first, b"),
        (r"(?P<a>\d)\+", [ADD], "must be its arguments, not a"),
    ],
)
def test_a_pattern_that_could_never_match_the_tools_is_refused(parse, pattern, tools, error):
    with pytest.raises(ConfigError, match=rf"environment.call_pattern=.*{error}"):
        parse("regex", "1+2", tools, pattern=pattern)


def test_an_empty_name_in_a_match_names_no_tool(parse):
    pattern = r"(?P<name>\w*): (?P<arguments>\{.*\})"
    (call,) = parse("regex", ': {"a": 1, "b": 2}', [ADD], pattern=pattern).calls
    assert (call.name, call.outcome) != ("add", CallOutcome.OK)


@pytest.mark.parametrize("name", ["hermes", "regex"])
def test_without_tools_a_call_is_text(parse, name):
    turn = f"so {SUM_CALL} or (1+2)"
    assert parse(name, turn, [], pattern=ADDITION) == Reply(turn)


def test_a_pattern_that_backtracks_has_a_deadline(parse, monkeypatch):
    monkeypatch.setattr(call_formats, "SEARCH_TIMEOUT_S", 0.01)
    reply = parse("regex", "x" * 5000, [ADD], pattern=r"(?P<a>(x+x+)+)(?P<b>y)")
    assert [call.outcome for call in reply.calls] == [CallOutcome.MALFORMED]
    assert reply.text == "x" * 5000


@pytest.mark.parametrize(
    ("name", "pattern", "error"),
    [
        ("hermse", "", "environment.call_format=hermse: .*the nearest format is hermes"),
        ("xyz", "", "the formats are hermes, harmony, regex, text, .*, kimi_k2, .*qwen3_coder"),
        ("regex", "(", "environment.call_pattern=.*missing \\)"),
        ("regex", "(a)", "has no named groups"),
    ],
)
def test_an_unusable_format_is_refused(marker_tokenizer, name, pattern, error):
    with pytest.raises(ConfigError, match=error):
        make_call_format(name, marker_tokenizer, pattern=pattern)


def test_a_reply_becomes_an_assistant_message(parse):
    message = make_assistant_message(parse("hermes", f"I add.\n{SUM_CALL}"))
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    assert message == {"role": "assistant", "content": "I add.", "tool_calls": calls}
    assert make_assistant_message(Reply("hello")) == {"role": "assistant", "content": "hello"}
