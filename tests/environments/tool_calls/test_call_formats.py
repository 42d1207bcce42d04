"""Parsing of sampled turns: families' formats, markers by token id, outcomes, cut turns."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.environments.interface import CallOutcome, Reply
from streamrl.environments.tool_calls.call_formats import (
    MAX_SPANS,
    OWN_FORMATS,
    make_assistant_message,
    make_call_format,
)
from streamrl.environments.tool_calls.marked_turn import THINK_END
from streamrl.errors import ConfigError

Encode = Callable[[str], list[int]]
PATTERN = r"<<(?P<name>\w+) (?P<arguments>.*?)>>"

MARKED_FORMATS = [*OWN_FORMATS, "regex"]


def make_tool(name: str, properties: dict[str, Any] | None = None) -> dict[str, Any]:
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


def parse(tokenizer: Any, name: str, token_ids: list[int], **options: Any) -> Reply:
    pattern = PATTERN if name == "regex" else ""
    return make_call_format(name, tokenizer, pattern=pattern).parse(token_ids, TOOLS, **options)


def describe(reply: Reply) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    assert all(call.outcome is CallOutcome.OK for call in reply.calls), reply.calls
    return reply.text, [(call.name, dict(call.arguments)) for call in reply.calls]


SUM = ("add", {"a": 1, "b": 2})
HI = ("say", {"text": "hi"})
SUM_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
HI_JSON = '{"name": "say", "arguments": {"text": "hi"}}'
TO_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'
THOUGHT = "<|channel|>analysis<|message|>add 1 and 2?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("name", "turn", "text", "calls"),
    [
        ("hermes", f"<tool_call>\n{SUM_JSON}\n</tool_call>", "", [SUM]),
        ("hermes", f"I add.\n<tool_call>{SUM_JSON}</tool_call>\nDone.", "I add.\nDone.", [SUM]),
        (
            "hermes",
            f"<tool_call>{SUM_JSON}</tool_call>\n<tool_call>{HI_JSON}</tool_call>",
            "",
            [SUM, HI],
        ),
        (
            "hermes",
            f"<think><tool_call>{SUM_JSON}</tool_call></think>\n<tool_call>{HI_JSON}</tool_call>",
            f"<think><tool_call>{SUM_JSON}</tool_call></think>",
            [HI],
        ),
        ("harmony", f"{THOUGHT}{TO_ADD}<|call|>", "", [SUM]),
        ("harmony", f"{THOUGHT}{TO_ADD}", "", [SUM]),
        (
            "harmony",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
            "",
            [SUM],
        ),
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
def test_calls_in_the_format_of_a_family_are_parsed(
    marker_tokenizer: Any, encode: Encode, name: str, turn: str, text: str, calls: list[Any]
):
    assert describe(parse(marker_tokenizer, name, encode(turn))) == (text, calls)


@pytest.mark.parametrize(
    ("name", "turn", "error"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "character"),
        ("hermes", f"<tool_call>{SUM_JSON}", "expected </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "key name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "key arguments"),
        (
            "hermes",
            '<tool_call>{"name": "any", "arguments": {"a": NaN}}</tool_call>',
            "NaN is not JSON",
        ),
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
def test_a_call_that_cannot_be_parsed_is_malformed_and_stays_in_the_text(
    marker_tokenizer: Any, encode: Encode, name: str, turn: str, error: str
):
    reply = parse(marker_tokenizer, name, encode(turn))
    (call,) = reply.calls
    assert call.outcome is CallOutcome.MALFORMED
    assert error in call.error
    assert call.arguments == {}
    assert "\n" not in call.error
    assert reply.text == turn


def test_a_call_after_a_malformed_one_is_made(marker_tokenizer: Any, encode: Encode):
    turn = f'<tool_call>{{"name": "add<tool_call>{SUM_JSON}</tool_call>'
    reply = parse(marker_tokenizer, "hermes", encode(turn))
    assert [call.outcome for call in reply.calls] == [CallOutcome.MALFORMED, CallOutcome.OK]


def test_unknown_tools_and_wrong_arguments_are_told_apart(marker_tokenizer: Any, encode: Encode):
    written = [{"a": 1}, {"a": "1", "b": 2}, {"a": 1, "b": 2, "c": 3}]
    made = [("ad", {"a": 1, "b": 2}), *(("add", arguments) for arguments in written)]
    objects = [json.dumps({"name": name, "arguments": entry}) for name, entry in made]
    turn = "".join(f"<tool_call>{text}</tool_call>" for text in objects)
    calls = parse(marker_tokenizer, "hermes", encode(turn)).calls
    wrong = CallOutcome.WRONG_ARGUMENTS
    assert [call.outcome for call in calls] == [CallOutcome.UNKNOWN_TOOL, wrong, wrong, wrong]
    assert [call.error for call in calls] == [
        "unknown tool 'ad'; the nearest tool is add",
        "wrong arguments for add: 'b' is a required property",
        "wrong arguments for add: a: '1' is not of type 'integer'",
        "wrong arguments for add: Additional properties are not allowed ('c' was unexpected)",
    ]
    assert calls[2].arguments == {"a": "1", "b": 2}


@pytest.mark.parametrize("name", [name for name in MARKED_FORMATS if name != "regex"])
def test_a_marker_spelled_in_ordinary_tokens_is_text(
    marker_tokenizer: Any, encode: Encode, encode_chars: Encode, name: str
):
    turns = {
        "hermes": f"<tool_call>{SUM_JSON}</tool_call>",
        "harmony": f"{THOUGHT}{TO_ADD}<|call|>",
    }
    turn = turns[name]
    assert len(parse(marker_tokenizer, name, encode(turn)).calls) == 1
    assert parse(marker_tokenizer, name, encode_chars(turn)) == Reply(turn)


def test_special_tokens_are_no_text_and_do_not_repair_a_call(marker_tokenizer: Any, encode: Encode):
    reply = parse(marker_tokenizer, "hermes", encode("The sum<|call|> is 3.<|im_end|>"))
    assert reply == Reply("The sum is 3.")
    turn = f"<tool_call>{SUM_JSON}</tool_call>"
    (call,) = parse(marker_tokenizer, "hermes", encode(turn.replace(":", ":<|call|>"))).calls
    assert call.outcome is CallOutcome.MALFORMED
    (call,) = parse(
        marker_tokenizer,
        "hermes",
        encode(f"<tool_call>{HI_JSON.replace('hi', 'a<|call|>b</tool_call>')}</tool_call>"),
    ).calls
    assert call.arguments == {"text": "a<|call|>b</tool_call>"}


def test_a_marker_that_is_no_token_is_found_by_its_spelling(plain_tokenizer: Any):
    turn = f"I add.<tool_call>{SUM_JSON}</tool_call>"
    token_ids = plain_tokenizer.encode(turn)
    assert describe(parse(plain_tokenizer, "hermes", token_ids)) == ("I add.", [SUM])


CUT_TURNS = {
    "hermes": f"<tool_call>{SUM_JSON}</tool_call>",
    "harmony": f"{TO_ADD}<|call|>",
    "regex": '<<add {"a": 1, "b": 2}>>',
}


@pytest.mark.parametrize("name", MARKED_FORMATS)
def test_a_call_cut_by_the_length_limit_is_text_and_not_malformed(
    marker_tokenizer: Any, encode: Encode, name: str
):
    token_ids = encode(CUT_TURNS[name])
    assert len(parse(marker_tokenizer, name, token_ids, is_cut=True).calls) == 1
    for length in range(len(token_ids)):
        reply = parse(marker_tokenizer, name, token_ids[:length], is_cut=True)
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


def write_object(arguments: dict[str, Any], is_ascii: bool, key: str = "arguments") -> str:
    return json.dumps({"name": "any", key: arguments}, ensure_ascii=is_ascii)


JSON_WRITERS: dict[str, Callable[[dict[str, Any], bool], str]] = {
    "hermes": lambda a, x: f"<tool_call>\n{write_object(a, x)}\n</tool_call>",
    "harmony": lambda a, x: (
        f"<|channel|>commentary to=functions.any <|constrain|>json<|message|>"
        f"{json.dumps(a, ensure_ascii=x)}<|call|>"
    ),
}


@pytest.mark.parametrize("name", JSON_WRITERS)
@given(arguments=ARGUMENTS, is_ascii=st.booleans())
def test_any_arguments_written_in_json_come_back(
    marker_tokenizer: Any, encode: Encode, name: str, arguments: dict[str, Any], is_ascii: bool
):
    turn = JSON_WRITERS[name](arguments, is_ascii)
    reply = parse(marker_tokenizer, name.split()[0], encode(turn))
    assert describe(reply) == ("", [("any", arguments)])


@pytest.mark.parametrize("name", MARKED_FORMATS)
@given(text=st.text() | STRINGS)
def test_text_without_markers_comes_back_unchanged(
    marker_tokenizer: Any, encode_chars: Encode, name: str, text: str
):
    for is_cut in (False, True):
        reply = parse(marker_tokenizer, name, encode_chars(text), is_cut=is_cut)
        assert reply == Reply(text, is_cut=is_cut)


@pytest.mark.parametrize("name", MARKED_FORMATS)
@given(data=st.data(), is_cut=st.booleans())
def test_a_garbled_turn_never_raises(
    marker_tokenizer: Any, encode: Encode, name: str, data: st.DataObject, is_cut: bool
):
    known = st.sampled_from(encode(CUT_TURNS[name] + TO_ADD))
    any_token = st.integers(0, len(marker_tokenizer) - 1)
    token_ids = data.draw(st.lists(known | any_token, max_size=40))
    reply = parse(marker_tokenizer, name, token_ids, is_cut=is_cut)
    for call in reply.calls:
        assert bool(call.error) == (call.outcome is not CallOutcome.OK)
    reply.text.encode()
    json.dumps(make_assistant_message(reply)).encode()


def test_a_repeated_marker_makes_a_bounded_number_of_calls(marker_tokenizer: Any, encode: Encode):
    token_ids = encode("<tool_call>") * 5000
    assert len(parse(marker_tokenizer, "hermes", token_ids).calls) == MAX_SPANS


def test_text_arguments_take_the_types_of_the_schema(marker_tokenizer: Any, encode: Encode):
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
    call_format = make_call_format("regex", marker_tokenizer, pattern=pattern)
    (call,) = call_format.parse(encode(turn), [make_tool("set", properties)]).calls
    expected = {"flag": True, "text": "12", "limit": None, "note": "12", "anything": [1]}
    assert call.arguments == expected
    assert call.outcome is CallOutcome.OK


def test_a_pattern_without_name_calls_the_only_tool(marker_tokenizer: Any, encode: Encode):
    pattern = r"\((?P<a>-?\d+)\+(?P<b>[^)]*)\)"
    call_format = make_call_format("regex", marker_tokenizer, pattern=pattern)
    assert describe(call_format.parse(encode("so (1+2) and (3+4)"), [ADD])) == (
        "so\nand",
        [SUM, ("add", {"a": 3, "b": 4})],
    )
    (call,) = call_format.parse(encode("(1+x)"), [ADD]).calls
    assert call.outcome is CallOutcome.WRONG_ARGUMENTS
    with pytest.raises(ConfigError, match="must have one tool"):
        call_format.parse(encode("(1+2)"), [ADD, SAY])


@pytest.mark.parametrize("pattern", [r"(?P<first>\d)\+(?P<b>\d)", r"(?P<a>\d)\+"])
def test_a_pattern_that_could_never_match_the_tool_is_refused(
    marker_tokenizer: Any, encode: Encode, pattern: str
):
    call_format = make_call_format("regex", marker_tokenizer, pattern=pattern)
    with pytest.raises(
        ConfigError, match=r"environment.call_pattern=.*: .* must be its arguments, not "
    ):
        call_format.parse(encode("1+2"), [ADD])


def test_an_empty_name_in_a_match_names_no_tool(marker_tokenizer: Any, encode: Encode):
    pattern = r"(?P<name>\w*): (?P<arguments>\{.*\})"
    call_format = make_call_format("regex", marker_tokenizer, pattern=pattern)
    (call,) = call_format.parse(encode(': {"a": 1, "b": 2}'), [ADD]).calls
    assert (call.name, call.outcome) != ("add", CallOutcome.OK)


@pytest.mark.parametrize("name", ["hermes", "regex"])
def test_without_tools_a_call_is_text(name: str, marker_tokenizer: Any, encode: Encode):
    turn = 'so <tool_call>{"name": "add", "arguments": {}}</tool_call> or (1+2)'
    pattern = r"\((?P<a>\d)\+(?P<b>\d)\)" if name == "regex" else ""
    call_format = make_call_format(name, marker_tokenizer, pattern=pattern)
    assert call_format.parse(encode(turn), []) == Reply(turn)


def test_a_pattern_that_backtracks_has_a_deadline(
    marker_tokenizer: Any, encode: Encode, monkeypatch: pytest.MonkeyPatch
):
    module = "streamrl.environments.tool_calls.call_formats.SEARCH_TIMEOUT_S"
    monkeypatch.setattr(module, 0.01)
    call_format = make_call_format("regex", marker_tokenizer, pattern=r"(?P<a>(x+x+)+)(?P<b>y)")
    reply = call_format.parse(encode("x" * 5000), [ADD])
    assert [call.outcome for call in reply.calls] == [CallOutcome.MALFORMED]
    assert reply.text == "x" * 5000


@pytest.mark.parametrize(
    ("name", "pattern", "error"),
    [
        ("hermse", "", "environment.call_format=hermse: .*the nearest format is hermes"),
        ("xyz", "", "the formats are hermes, harmony, regex, text, .*, kimi_k2, .*qwen3_coder"),
        ("regex", "", "has no named groups"),
        ("regex", "(", "environment.call_pattern=.*missing \\)"),
        ("regex", "(a)", "has no named groups"),
    ],
)
def test_an_unusable_format_is_refused(marker_tokenizer: Any, name: str, pattern: str, error: str):
    with pytest.raises(ConfigError, match=error):
        make_call_format(name, marker_tokenizer, pattern=pattern)


def test_a_reply_becomes_an_assistant_message(marker_tokenizer: Any, encode: Encode):
    turn = f"I add.\n<tool_call>{SUM_JSON}</tool_call>"
    message = make_assistant_message(parse(marker_tokenizer, "hermes", encode(turn)))
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    assert message == {"role": "assistant", "content": "I add.", "tool_calls": calls}
    assert make_assistant_message(Reply("hello")) == {"role": "assistant", "content": "hello"}
