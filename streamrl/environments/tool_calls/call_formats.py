"""Formats in which model families write tool calls: choice by name or template, and parsing.

format = make_call_format("hermes", tokenizer)
reply = format.parse(token_ids, tools)
reply.calls[0].name, reply.calls[0].arguments, reply.calls[0].outcome
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from streamrl.environments.interface import CallOutcome, Message, Reply, ToolCall, ToolSchema
from streamrl.environments.tool_calls.call_id import make_call_id
from streamrl.environments.tool_calls.enclosed_calls import (
    CLOSING,
    OPENING,
    find_hermes_calls,
    find_qwen_coder_calls,
)
from streamrl.environments.tool_calls.harmony_calls import HARMONY_MARKERS, find_harmony_calls
from streamrl.environments.tool_calls.json_calls import (
    ARGS,
    CALL_ID,
    PYTHON_TAG,
    TOOL_CALLS,
    find_llama3_calls,
    find_mistral_calls,
)
from streamrl.environments.tool_calls.literal_calls import (
    PYTHONIC_MARKERS,
    find_pythonic_calls,
    make_pattern_finder,
)
from streamrl.environments.tool_calls.marked_turn import (
    MarkedTurn,
    MarkerDecoder,
    ScaffoldSpan,
    WrittenCall,
)
from streamrl.environments.tool_calls.strict_json import check_encodable
from streamrl.environments.tool_calls.tool_schema import get_tool_name, validate_arguments
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FindCalls = Callable[[MarkedTurn], Iterable[WrittenCall | ScaffoldSpan]]
"""Function that yields the calls of a turn in order; calls of one list share their characters."""
MAX_SPANS = 256
"""Most calls that are read in a turn; a policy that repeats a marker would write thousands."""
REGEX_FORMAT, TEXT_FORMAT = "regex", "text"
"""Format of the user's pattern; turns without calls, for environments without tools."""


@dataclass(frozen=True)
class FormatRow:
    """Row of the table of formats.

    markers: texts that may be single tokens of the vocabulary. template_sign: regular expression
    that is found in chat templates of this format only.
    """

    find_calls: FindCalls
    markers: tuple[str, ...]
    template_sign: str


FORMAT_ROWS: Mapping[str, FormatRow] = {
    # GLM and Qwen's coder models write no JSON between the same markers.
    "hermes": FormatRow(
        find_hermes_calls,
        (OPENING, CLOSING),
        r"(?s)\A(?!.*(?:<arg_key>|<function=)).*<tool_call>",
    ),
    "qwen_coder": FormatRow(
        find_qwen_coder_calls, (OPENING, CLOSING), r"(?s)<tool_call>.*<function="
    ),
    "llama3": FormatRow(
        find_llama3_calls, (PYTHON_TAG,), r'<\|python_tag\|>|parameters\\?": dictionary'
    ),
    "mistral": FormatRow(find_mistral_calls, (TOOL_CALLS, ARGS, CALL_ID), r"\[TOOL_CALLS\]"),
    "harmony": FormatRow(find_harmony_calls, HARMONY_MARKERS, r"<\|channel\|>"),
    "pythonic": FormatRow(
        find_pythonic_calls,
        (*PYTHONIC_MARKERS.keys(), *PYTHONIC_MARKERS.values()),
        r"func_name1\(|<\|python_start\|>|<\|tool_call_start\|>",
    ),
}
CALL_FORMATS = (*FORMAT_ROWS, REGEX_FORMAT, TEXT_FORMAT)
"""Names of the formats."""


class CallFormat:
    """Parser of the tool calls in a sampled turn; made by `make_call_format`."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", markers: Sequence[str], find_calls: FindCalls
    ) -> None:
        self._decoder = MarkerDecoder(tokenizer, markers)
        self._find_calls = find_calls

    def parse(
        self, token_ids: Sequence[int], tools: Sequence[ToolSchema], *, is_cut: bool = False
    ) -> Reply:
        """Split a sampled turn into text and tool calls, each with its outcome.

        token_ids: the sampled tokens, with or without the token that ended the turn. is_cut: the
        turn ended at a length limit; a call that it did not finish is text, and so is any call
        without tools. Never raises for what the policy wrote.
        """
        by_name = {get_tool_name(tool): tool for tool in tools}
        turn = self._decoder.decode(token_ids, by_name, is_cut=is_cut)
        spans = [_check_encodable_call(s) for s in islice(self._find_calls(turn), MAX_SPANS)]
        if not tools:
            spans = [span for span in spans if isinstance(span, ScaffoldSpan)]
        calls = [check_call(span, by_name) for span in spans if isinstance(span, WrittenCall)]
        return Reply(_read_text(turn, spans), tuple(calls), is_cut)


def _check_encodable_call(span: WrittenCall | ScaffoldSpan) -> WrittenCall | ScaffoldSpan:
    """Return the span; a call with strings that UTF-8 cannot encode gets an error."""
    if isinstance(span, WrittenCall) and not span.error:
        try:
            check_encodable([span.name, span.arguments])
        except ValueError as error:
            return WrittenCall(span.start, span.end, error=str(error))
    return span


def check_call(call: WrittenCall, tools: Mapping[str, ToolSchema]) -> ToolCall:
    """Return the call with its outcome and, unless it is OK, the text to tell the policy."""
    if call.error:
        error = f"malformed tool call: {call.error}"
        return ToolCall(call.name, {}, CallOutcome.MALFORMED, error)
    if call.name not in tools:
        hint = suggest_nearest(call.name, tools, noun="tool")
        error = f"unknown tool {call.name!r:.60}; {hint}"
        return ToolCall(call.name, call.arguments, CallOutcome.UNKNOWN_TOOL, error)
    if problem := validate_arguments(tools[call.name], call.arguments):
        error = f"wrong arguments for {call.name}: {problem}"
        return ToolCall(call.name, call.arguments, CallOutcome.WRONG_ARGUMENTS, error)
    return ToolCall(call.name, call.arguments)


def _read_text(turn: MarkedTurn, spans: Sequence[WrittenCall | ScaffoldSpan]) -> str:
    """Return the turn without its spans and the spaces around them; malformed calls stay."""
    removed = [s for s in spans if isinstance(s, ScaffoldSpan) or not s.error]
    if not removed:
        return turn.spell_text(turn.text)
    parts, end = [], 0
    for span in removed:
        parts.append(turn.text[end : span.start])
        end = max(end, span.end)
    parts.append(turn.text[end:])
    stripped = [turn.spell_text(part).strip() for part in parts]
    return "\n".join(part for part in stripped if part)


def make_call_format(
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    pattern: str = "",
    setting: str = "environment.call_format",
) -> CallFormat:
    """Return the call format of that name.

    pattern: regular expression of the format "regex", see `make_pattern_finder`. setting: config
    key of the name, for errors. Raises ConfigError for an unknown name or an invalid pattern.
    """
    if name not in CALL_FORMATS:
        hint = suggest_nearest(name, CALL_FORMATS, noun="format")
        raise ConfigError(f"{setting}={name}: no such format of tool calls; {hint}")
    if name == REGEX_FORMAT:
        if not pattern:
            raise ConfigError(f"{setting}={name}: needs a pattern")
        pattern_setting = setting.replace("call_format", "call_pattern")
        return CallFormat(tokenizer, (), make_pattern_finder(pattern, setting=pattern_setting))
    if pattern:
        raise ConfigError(f"{setting}={name}: takes no pattern; only {REGEX_FORMAT} does")
    if name == TEXT_FORMAT:
        return CallFormat(tokenizer, (), lambda turn: ())
    row = FORMAT_ROWS[name]
    return CallFormat(tokenizer, row.markers, row.find_calls)


def detect_call_format(
    tokenizer: "PreTrainedTokenizerBase",
    template_source: str | None,
    *,
    setting: str = "environment.call_format",
) -> str:
    """Return the name of the format that a model writes.

    The chat template decides, as it shows calls to the model. If it knows no tools at all, the
    vocabulary decides by its markers. Raises ConfigError if the one that decides has no sign.
    """
    template = template_source or ""
    for name, row in FORMAT_ROWS.items():
        if re.search(row.template_sign, template):
            return name
    # Families share markers: GLM has <tool_call>, but in its template, calls look different.
    vocabulary = {} if "tools" in template else tokenizer.get_added_vocab()
    for name, row in FORMAT_ROWS.items():
        if row.markers[0] in vocabulary:
            return name
    raise ConfigError(
        f"{setting}=auto: the chat template shows tool calls in no known format; set it to one of"
        f" {', '.join(CALL_FORMATS)}"
    )


def make_assistant_message(reply: Reply) -> Message:
    """Return a reply as a chat message.

    Arguments are objects, as chat templates take them; OpenAI's API
    has JSON text there. A call that could not be parsed is part of the content, as written.
    """
    message: dict[str, object] = {"role": "assistant", "content": reply.text}
    calls = [
        {
            "id": make_call_id(number),
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for number, call in enumerate(reply.calls)
        if call.outcome is not CallOutcome.MALFORMED
    ]
    return {**message, "tool_calls": calls} if calls else message
