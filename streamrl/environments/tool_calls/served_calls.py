"""Calls as the parsers read them that vLLM installs for some fifty families.

vLLM is imported when such a format is chosen: in a generator's process it is there already.
"""

import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_calls.json_calls import parse_json, read_arguments_object
from streamrl.environments.tool_calls.marked_turn import (
    THINK_END,
    MarkedTurn,
    ScaffoldSpan,
    WrittenCall,
)
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
