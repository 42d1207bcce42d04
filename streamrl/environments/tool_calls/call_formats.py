"""Formats in which model families write tool calls: choice by name or template, and parsing.

format = make_call_format("hermes", tokenizer)
reply = format.parse(token_ids, tools)
reply.calls[0].name, reply.calls[0].arguments, reply.calls[0].outcome

Most formats are read by the parsers that vLLM installs for some fifty families. vLLM is imported
when such a format is chosen: in a generator's process it is there already.

Two formats have parsers of their own. In hermes, the format of Qwen, vLLM's parser ends a call at
the first </tool_call>, also within a string, and gives up a whole turn for one malformed call. In
harmony, the format of gpt-oss, a turn has several messages, some of them to a tool:

<|channel|>analysis<|message|>I must add.<|end|><|start|>assistant
<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
"""

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

from streamrl.environments.interface import CallOutcome, Message, Reply, ToolCall, ToolSchema
from streamrl.environments.tool_calls.marked_turn import (
    THINK_END,
    MarkedTurn,
    MarkerDecoder,
    ScaffoldSpan,
    WrittenCall,
)
from streamrl.environments.tool_calls.reply_text import make_call
from streamrl.environments.tool_calls.schema_check import is_valid_argument, validate_arguments
from streamrl.environments.tool_calls.tool_schema import get_parameters, get_tool_name
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import check_depth, make_unique_dict
from streamrl.files.typed_settings import suggest_nearest
from streamrl.rewards.interface.answers import SEARCH_TIMEOUT_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *MESSAGE_ENDS)
THINKING_CHANNEL = "analysis"
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


def find_harmony_calls(turn: MarkedTurn) -> Iterator[WrittenCall | ScaffoldSpan]:
    """Yield messages to functions.NAME as calls; headers and thoughts as scaffold."""
    message = turn.get_code(MESSAGE)
    end = turn.start
    while (header_end := turn.text.find(message, end)) >= 0:
        start, body = end, header_end + len(message)
        header = _spell_header(turn, turn.text[start:header_end])
        if recipient := _RECIPIENT.search(header):
            call = _read_message_call(turn, start, body, recipient[1])
            if call is None:
                return
            end = call.end
            yield call
        else:
            body_end, end = _find_message_end(turn, body)
            is_thought = THINKING_CHANNEL in header.split()
            yield ScaffoldSpan(start, end if is_thought else body)
            yield ScaffoldSpan(body_end, end)


def _read_message_call(
    turn: MarkedTurn, start: int, body: int, recipient: str
) -> WrittenCall | None:
    """Read the message to a tool whose body begins at `body`; None if the turn was cut in it."""
    error, arguments, value_end = "", None, body
    try:
        value, value_end = turn.parse_at(body, parse_json_at)
        arguments = read_arguments_object(value, "the message")
    except ValueError as problem:
        error = str(problem)
    body_end, end = _find_message_end(turn, value_end)
    # Engines leave out <|call|> if it is a stop token, so only a cut turn must have it.
    if body_end == end == len(turn.text) and turn.is_cut:
        return None
    if not error and turn.text[value_end:body_end].strip():
        error = "expected the end of the message after the arguments"
    return WrittenCall(start, end, recipient.removeprefix("functions."), arguments, error)


def _find_message_end(turn: MarkedTurn, start: int) -> tuple[int, int]:
    """Return where a message's body ends, and where its end marker ends."""
    codes = [turn.get_code(marker) for marker in (START, *MESSAGE_ENDS)]
    found = re.compile("|".join(map(re.escape, codes))).search(turn.text, start)
    if not found:
        return len(turn.text), len(turn.text)
    is_next_message = found[0] == turn.get_code(START)
    return found.start(), found.start() if is_next_message else found.end()


def _spell_header(turn: MarkedTurn, header: str) -> str:
    """Return a message's header with spaces for its markers."""
    for marker in HARMONY_MARKERS:
        header = header.replace(turn.get_code(marker), " ")
    return header


OPENING, CLOSING = "<tool_call>", "</tool_call>"


def find_hermes_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
    """Yield calls such as <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>."""
    opening, closing = turn.get_code(OPENING), turn.get_code(CLOSING)
    end = turn.start
    while (start := turn.text.find(opening, end)) >= 0:
        body = start + len(opening)
        try:
            value, end = turn.parse_at(body, parse_json_at)
            name, arguments = read_call_object(value)
            end = turn.skip_space(end)
            if not turn.text.startswith(closing, end):
                raise ValueError(f"expected {CLOSING} after the call")
        except ValueError as error:
            end = _find_end(turn, body)
            if end < 0:
                return
            yield WrittenCall(start, end, error=str(error))
        else:
            end += len(closing)
            yield WrittenCall(start, end, name, arguments)


def _find_end(turn: MarkedTurn, body: int) -> int:
    """Return where a malformed call ends; -1 if the turn was cut within the call."""
    opening, closing = turn.get_code(OPENING), turn.get_code(CLOSING)
    last = turn.text.find(closing, body)
    following = turn.text.find(opening, body)
    if last >= 0 and not 0 <= following < last:
        return last + len(closing)
    if following >= 0:
        return following
    return -1 if turn.is_cut else len(turn.text)


def read_call_object(value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return name and arguments of a call.

    Raises ValueError unless the value is an object with a name and an object of arguments.
    """
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object with the keys name and arguments")
    name = value.get("name")
    if not (isinstance(name, str) and name):
        raise ValueError("the key name must hold the name of a tool")
    return name, read_arguments_object(value.get("arguments"), "the key arguments")


def read_arguments_object(value: Any, place: str) -> Mapping[str, Any]:
    """Return arguments. place: where they stand. Raises ValueError unless they are an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} must hold a JSON object with the arguments")
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at `start`; return it and the position of its end.

    Raises ValueError, also for NaN and Infinity, duplicate keys, deep nesting and numbers out of
    range. Positions in the message count from `start`.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value, end


def parse_json(text: str) -> Any:
    """Parse a text that is one JSON value. Raises ValueError as `parse_json_at` does."""
    text = text.strip()
    value, end = parse_json_at(text, 0)
    if end < len(text):
        raise ValueError(f"expected the end of the value at character {end}")
    return value


def check_encodable(value: Any) -> None:
    """Raise ValueError for a JSON value with a string that UTF-8 cannot encode.

    Escapes can write half a surrogate pair, which hosts of environments and tokenizers refuse.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string contains half a surrogate pair") from None


def parse_finite_float(number: str) -> float:
    """Convert a JSON number to a float. Raises ValueError if it is out of range."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]} is out of range")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=make_unique_dict,
    parse_constant=_refuse_constant,
    parse_float=parse_finite_float,
)


BREAK = "\ue000"
"""Character of private use within a marker that a policy merely spells."""
UNUSABLE = ("hermes", "openai", "hf")
"""Names of vLLM's that stay unused: ours reads more, a stub, one that needs its server."""
MAX_OPENINGS = 256
"""Most openings of a call that a turn may have; parsers search it anew for each."""


@functools.cache
def get_parser_manager() -> Any:
    """Return vLLM's registry of parsers, which log no errors of the policy."""
    from vllm.tool_parsers import ToolParserManager

    # They log a traceback for each call that a policy gets wrong.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
    return ToolParserManager


def list_served_formats() -> list[str]:
    """Return the names of vLLM's parsers."""
    return [name for name in get_parser_manager().list_registered() if name not in UNUSABLE]


class ShownCall(NamedTuple):
    """Call as a chat template shows it to the model: its text, the call, and the tool.

    answer: a turn without a call, as the template shows it.
    """

    text: str
    name: str
    arguments: Mapping[str, Any]
    tool: ToolSchema
    answer: str = ""

    @property
    def opening(self) -> str:
        """Text before the name of the tool, after an empty thought; "" if any turn begins so."""
        opening = self.text[: self.text.find(self.name)].rpartition(THINK_END)[2]
        return "" if self.answer.startswith(opening) else opening


class ServedParser:
    """Finder of calls (`FindCalls`) by a parser of vLLM.

    shown: a call in the chat template, if it shows any. A turn that begins a call like it and has
    none for the parser is a malformed call. markers: tokens that belong to calls. Raises
    ConfigError if the parser refuses the tokenizer, which lacks its markers.
    """

    def __init__(
        self, name: str, tokenizer: "PreTrainedTokenizerBase", shown: ShownCall | None
    ) -> None:
        self._name, self._tokenizer = name, tokenizer
        added = set(filter(str.strip, tokenizer.get_added_vocab()))
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        ends = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        in_calls = self._added.findall(shown.text) if shown else added - ends
        self.markers = tuple(added - special | {*in_calls})
        opening = shown.opening if shown else ""
        found = self._added.search(opening)
        self._marker = found[0] if found else ""
        self._start = "" if found else "".join(opening.split())
        self._make_parser = functools.lru_cache(maxsize=16)(self._construct_parser)
        try:
            self._make_parser("[]")
        # Each parser has errors of its own for a tokenizer that it cannot serve.
        except Exception as error:
            raise ConfigError(
                f"environment.call_format={name}: vLLM's parser refuses the tokenizer: {error}"
            ) from error

    def _construct_parser(self, tools: str) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        messages = [{"role": "user", "content": ""}]
        request = ChatCompletionRequest(messages=messages, tools=json.loads(tools) or None)
        parser_class = get_parser_manager().get_tool_parser(self._name)
        return parser_class(self._tokenizer, request.tools), request

    def __call__(self, turn: MarkedTurn) -> Iterator[WrittenCall | ScaffoldSpan]:
        """Yield the calls of a turn; none of one that a limit cut, as parsers complete calls."""
        text = self._write_text(turn, turn.text[turn.start :])
        whole = (turn.start, len(turn.text))
        # Some parsers read a call without its marker, which may be a quotation.
        if turn.is_cut or not turn.tools or self._marker not in text:
            return
        if text.count(self._marker or BREAK) > MAX_OPENINGS:
            yield WrittenCall(*whole, error=f"more than {MAX_OPENINGS} calls")
            return
        try:
            parser, request = self._make_parser(json.dumps(list(turn.tools.values())))
            found = parser.extract_tool_calls(text, request)
        # Whatever a parser raises, the text of the policy is the cause.
        except Exception as error:  # noqa: BLE001
            yield WrittenCall(*whole, error=f"{self._name}: {type(error).__name__}: {error}")
            return
        calls = [_read_call(call.function, whole) for call in found.tool_calls]
        if not calls:
            is_start = self._start and "".join(text.split()).startswith(self._start)
            if self._marker or is_start:
                yield WrittenCall(*whole, error=f"not in the format {self._name}")
            return
        content = found.content or ""
        yield ScaffoldSpan(*whole, text=self._added.sub("", content).replace(BREAK, ""))
        yield from calls

    def _write_text(self, turn: MarkedTurn, part: str) -> str:
        """Return a part of a turn with its tokens spelled out, and spelled markers broken."""
        broken = self._added.sub(lambda found: found[0][:1] + BREAK + found[0][1:], part)
        return turn.spell(broken)


def _read_call(function: Any, span: tuple[int, int]) -> WrittenCall:
    name = function.name.replace(BREAK, "")
    try:
        value = parse_json((function.arguments or "{}").replace(BREAK, ""))
        return WrittenCall(*span, name, read_arguments_object(value, "a call"))
    except ValueError as error:
        return WrittenCall(*span, name, error=str(error))


FindCalls = Callable[[MarkedTurn], Iterable[WrittenCall | ScaffoldSpan]]
"""Function that yields the calls of a turn in order; calls of one list share their characters."""
SETTING = "environment.call_format"
MAX_SPANS = 256
"""Most calls that are read in a turn; a policy that repeats a marker would write thousands."""
REGEX_FORMAT, TEXT_FORMAT = "regex", "text"
"""Format of the user's pattern; turns without calls, for environments without tools."""


OWN_FORMATS: Mapping[str, tuple[FindCalls, tuple[str, ...]]] = {
    "hermes": (find_hermes_calls, (OPENING, CLOSING)),
    # vLLM's parser reads the ids of the published vocabulary, which it downloads.
    "harmony": (find_harmony_calls, HARMONY_MARKERS),
}
"""Formats that are parsed here, each with the markers that may be tokens of a vocabulary."""
COMMON_FORMATS = (
    *("qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "glm45", "gemma4", "kimi_k2"),
    *("lfm2", "pythonic"),
)
"""vLLM's parsers that are tried first."""
MARKER_FORMATS = {
    OPENING: "hermes",
    "<|channel|>": "harmony",
    "<|tool_call_start|>": "lfm2",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
}
"""Formats of vocabularies, for templates that show no calls."""


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
        parts.append(span.text if isinstance(span, ScaffoldSpan) else "")
        end = max(end, span.end)
    parts.append(turn.text[end:])
    stripped = [turn.spell_text(part).strip() for part in parts]
    return "\n".join(part for part in stripped if part)


NAME_GROUP, ARGUMENTS_GROUP = "name", "arguments"
PYTHON_WORDS = {"True": True, "False": False, "None": None}


def make_pattern_finder(pattern: str) -> Callable[[MarkedTurn], Iterator[WrittenCall]]:
    """Return a function that finds the calls that match a regular expression.

    The groups `name` and `arguments` (a JSON object) hold the call. Without a group `name`, the
    environment must have one tool; without a group `arguments`, every other named group is an
    argument, converted to the type in the schema. Raises ConfigError for an invalid pattern.
    """
    place = f"environment.call_pattern={pattern}"
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"{place}: {error}") from None
    if not compiled.groupindex:
        raise ConfigError(
            f"{place}: has no named groups; name a group after each argument, or write"
            f" (?P<{NAME_GROUP}>...) and (?P<{ARGUMENTS_GROUP}>...)"
        )

    def find_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
        if turn.tools and NAME_GROUP not in compiled.groupindex:
            _check_groups(compiled.groupindex, turn.tools, place=place)
        try:
            # concurrent=True releases the GIL during the search.
            for found in compiled.finditer(
                turn.text, turn.start, timeout=SEARCH_TIMEOUT_S, concurrent=True
            ):
                yield _read_match(turn, found)
        except TimeoutError:
            end = len(turn.text)
            yield WrittenCall(end, end, error="searching the turn for calls took too long")

    return find_calls


def _check_groups(groups: Iterable[str], tools: Mapping[str, ToolSchema], *, place: str) -> None:
    """Raise ConfigError unless the groups are the arguments of the only tool.

    No call of another pattern could ever be right.
    """
    parameters = get_parameters(next(iter(tools.values())))
    is_closed = parameters.get("additionalProperties", False) is False
    unknown = {*groups} - parameters.get("properties", {}).keys() if is_closed else set()
    missing = {*parameters.get("required", ())} - {*groups}
    has_arguments = ARGUMENTS_GROUP in groups or not (unknown or missing)
    if len(tools) != 1 or not has_arguments:
        raise ConfigError(
            f"{place}: without a group {NAME_GROUP} the environment must have one tool, and the"
            f" groups must be its arguments, not {', '.join(groups)}"
        )


def _read_match(turn: MarkedTurn, found: "regex.Match[str]") -> WrittenCall:
    texts = {key: turn.spell(text) for key, text in found.groupdict().items() if text is not None}
    has_name = NAME_GROUP in found.re.groupindex
    name = texts.pop(NAME_GROUP, "") if has_name else next(iter(turn.tools), "")
    start, end = found.span()
    if ARGUMENTS_GROUP in texts:
        try:
            arguments = read_arguments_object(parse_json(texts[ARGUMENTS_GROUP]), "the call")
        except ValueError as error:
            return WrittenCall(start, end, name, error=str(error))
    else:
        tool = turn.tools.get(name)
        arguments = {key: _read_argument(tool, key, text) for key, text in texts.items()}
    return WrittenCall(start, end, name, arguments)


def _read_argument(tool: ToolSchema | None, name: str, text: str) -> Any:
    """Return a text as JSON, or as Python writes it, if the tool's schema accepts that.

    Otherwise the text stays, as does a quoted string: the quotes belong to it.
    """
    try:
        value = PYTHON_WORDS[text] if text in PYTHON_WORDS else parse_json(text)
    except ValueError:
        return text
    if tool is None or isinstance(value, str) or not is_valid_argument(tool, name, value):
        return text
    return value


def make_call_format(
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    pattern: str = "",
    shown: ShownCall | None = None,
) -> CallFormat:
    """Return the call format of that name.

    pattern: regular expression of the format "regex", see `make_pattern_finder`. shown: a call in
    the chat template. Raises ConfigError for an unknown name, an invalid pattern, or a tokenizer
    without the format's tokens.
    """
    if name == REGEX_FORMAT:
        return CallFormat(tokenizer, (), make_pattern_finder(pattern))
    if name == TEXT_FORMAT:
        return CallFormat(tokenizer, (), lambda turn: ())
    if name in OWN_FORMATS:
        find_calls, markers = OWN_FORMATS[name]
        return CallFormat(tokenizer, markers, find_calls)
    if name not in list_served_formats():
        formats = _list_formats()
        hint = suggest_nearest(name, formats, noun="format")
        raise ConfigError(
            f"{SETTING}={name}: no such format of tool calls; {hint}; the formats are"
            f" {', '.join(formats)}"
        )
    parser = ServedParser(name, tokenizer, shown)
    return CallFormat(tokenizer, parser.markers, parser)


def detect_call_format(tokenizer: "PreTrainedTokenizerBase", shown: ShownCall | None) -> str:
    """Return the name of the format that a model writes: the first that reads what it is shown.

    shown: a call as the chat template shows it to the model. If the template shows none, the
    vocabulary decides by its markers. Raises ConfigError if no format reads the call.
    """
    if shown is None:
        vocabulary = tokenizer.get_added_vocab()
        found = (name for marker, name in MARKER_FORMATS.items() if marker in vocabulary)
    else:
        found = (name for name in _list_candidates() if _reads_call(name, tokenizer, shown))
    for name in found:
        return name
    raise ConfigError(
        f"{SETTING}=auto: the chat template shows tool calls in no known format; set it to one of"
        f" {', '.join(_list_formats())}"
    )


def _reads_call(name: str, tokenizer: "PreTrainedTokenizerBase", shown: ShownCall) -> bool:
    token_ids = tokenizer(shown.text, add_special_tokens=False)["input_ids"]
    try:
        calls = make_call_format(name, tokenizer, shown=shown).parse(token_ids, [shown.tool]).calls
    except ConfigError:
        return False
    return list(calls) == [ToolCall(shown.name, shown.arguments)]


def _list_formats() -> tuple[str, ...]:
    return (*OWN_FORMATS, REGEX_FORMAT, TEXT_FORMAT, *list_served_formats())


def _list_candidates() -> Iterator[str]:
    """Yield the formats; vLLM is imported only if none of ours fits."""
    yield from OWN_FORMATS
    yield from COMMON_FORMATS
    yield from (name for name in list_served_formats() if name not in COMMON_FORMATS)


def make_assistant_message(reply: Reply) -> Message:
    """Return a reply as a chat message; a call that could not be parsed is in its content."""
    message: dict[str, object] = {"role": "assistant", "content": reply.text}
    calls = [
        make_call(number, call.name, call.arguments)
        for number, call in enumerate(reply.calls)
        if call.outcome is not CallOutcome.MALFORMED
    ]
    return {**message, "tool_calls": calls} if calls else message
