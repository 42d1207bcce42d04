r"""Text between two sampled turns, derived from a chat template.

A template renders whole conversations only. The writer renders a synthetic one, whose reply and
observations are marker words, and takes what follows the reply:

    ...assistant\nREPLY <|im_end|>\n<|im_start|>user\n OBSERVATION <|im_end|>\n<|im_start|>assi...
                        |- closing -||--- header ----|             |-------- opening ----------|

Scaffold is every text that the template writes itself: closing, headers and opening.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from streamrl.data.chat_template import ChatTemplate, Conversation, render_text
from streamrl.data.guarded_text import CODE
from streamrl.environments.interface import Message, ToolSchema
from streamrl.environments.tool_calls.call_formats import ShownCall
from streamrl.environments.tool_calls.reply_text import make_call
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Letters and digits only: no template trims or escapes them.
QUESTION, REPLY, ARGUMENT, OBSERVATION = "Question7bx", "Reply7bx", "Argument7bx", "Observation7bx"
THOUGHT = "Thought7bx"
"""Marker words in place of the contents of a synthetic conversation."""
Arguments = Mapping[str, Any] | None


class TextPiece(NamedTuple):
    """Piece of a rendering, either of the template or of the environment."""

    text: str
    is_observation: bool


class BridgeText(NamedTuple):
    """Text between two sampled turns.

    closing: closes the sampled turn. pieces: scaffold, observation, scaffold, ..., observation,
    scaffold.
    """

    closing: str
    pieces: Sequence[TextPiece]


class BridgeWriter:
    """Writer of bridges and prompts as text.

    end_texts: texts of tokens that end a turn; those of the template are added. Raises ConfigError
    for a template from which the text around a user's message after a turn cannot be derived.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: ChatTemplate,
        end_texts: Iterable[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._encoder = template.get_encoder(tokenizer)
        inner, last = self._read_turn_markers()
        self.inner_markers = inner
        """Control tokens within a whole turn: thought, calls, answer."""
        self.end_texts = frozenset(end_texts) | (last - inner)
        question, reply = _make_question(), {"role": "assistant", "content": REPLY}
        # An assistant's turn, as it is last in a conversation.
        closed = self.render([question, reply], is_closed=True)
        self._closing = _cut_after_reply(closed) or ""
        self.user_bridge = self.write_bridge([{"role": "user", "content": OBSERVATION}])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Arguments = None,
        *,
        is_closed: bool = False,
    ) -> str:
        """Render a conversation, up to where the policy writes or, if `is_closed`, to its end."""
        roles = ", ".join(message["role"] for message in messages)
        conversation = Conversation(f"conversation of {roles}", messages, tools, arguments or {})
        return render_text(self._tokenizer, conversation, self._template, is_closed=is_closed)

    def _read_turn_markers(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the control tokens within whole turns of the template, and those that end one.

        What ends a message is no end of the turn where a turn has several (harmony's <|end|>).
        """
        inner, last = set(), set()
        thought = dict.fromkeys(("thinking", "reasoning_content", "reasoning"), THOUGHT)
        turn = {"role": "assistant", "content": "", **thought}
        results = [{"name": "look_up", "tool_call_id": f"call0000{i}"} for i in range(2)]
        for body in (
            {"content": REPLY},
            {"tool_calls": _make_calls(results[:1])},
            {"tool_calls": _make_calls(results)},
        ):
            try:
                opened = self.render([_make_question()])
                closed = self.render([_make_question(), {**turn, **body}], is_closed=True)
            except ConfigError:
                continue  # not each template takes calls, or several
            text = closed[self._encoder.find_split(opened, closed) :]
            if (after := _cut_after_reply(text)) is None:
                continue  # it shows no calls
            inner.update(self._encoder.find_markers(text[: len(text) - len(after)]))
            # Some templates open the next turn whether they are asked to or not.
            if self.render([_make_question()], is_closed=True) != opened:
                last.update(self._encoder.find_markers(after)[-1:])
        return frozenset(inner), frozenset(last)

    def show_call(self) -> ShownCall | None:
        """Return a call as the template shows it to the model; None if it shows none."""
        parameters = {"word": {"type": "string"}, "limit": {"type": "integer"}}
        schema = {"type": "object", "properties": parameters}
        function = {"name": "look_up", "description": "", "parameters": schema}
        tool: ToolSchema = {"type": "function", "function": function}
        tools = [tool] if self._template.can_render_tools else []
        arguments = {"word": 'say "hi", 7', "limit": 3}
        calls = [make_call(0, "look_up", arguments)]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            opened = self.render([_make_question()], tools)
            closed = self.render([_make_question(), turn], tools, is_closed=True)
            said = {"role": "assistant", "content": "a"}
            answered = self.render([_make_question(), said], tools, is_closed=True)
        except ConfigError:
            return None
        answer = answered[self._encoder.find_split(opened, answered) :].replace(CODE, "")
        text = closed[self._encoder.find_split(opened, closed) :]
        text = text[: self._find_turn_end(text)].replace(CODE, "")
        is_shown = "look_up" in text and "hi" in text
        return ShownCall(text, "look_up", arguments, tool, answer) if is_shown else None

    def write_prompt(
        self,
        messages: Sequence[Message],
        observation: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        arguments: Arguments = None,
    ) -> list[TextPiece]:
        """Render a conversation that starts with `messages` and ends with an observation."""
        if not observation:
            return [TextPiece(self.render(messages, tools, arguments), False)]
        inserted = range(len(messages), len(messages) + len(observation))
        return self.write_conversation([*messages, *observation], inserted, tools, arguments)

    def write_bridge(
        self, observation: Sequence[Message], arguments: Arguments = None
    ) -> BridgeText:
        """Return the text that follows a sampled turn, up to where the policy writes again.

        Raises ConfigError if the template does not support such an observation after a turn.
        """
        calls = [message for message in observation if message["role"] == "tool"]
        problems: list[ConfigError] = []
        for reply in _list_replies(calls):
            try:
                return self._write_after(reply, observation, arguments)
            except ConfigError as error:
                problems.append(error)
        raise problems[0]

    def write_turn(
        self,
        messages: Sequence[Message],
        turn: Message,
        observation: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
    ) -> str:
        """Return the text of an assistant's turn as the policy would write it, without closing.

        messages: before the turn. observation: after it. Text that the template leaves out, such as
        a thought, is part of the turn.
        """
        opened = self.render(messages, tools)
        whole = self.render([*messages, turn, *observation], tools)
        closing, pieces = self.write_bridge(observation)
        bridge = closing + "".join(piece.text for piece in pieces)
        if whole.startswith(opened) and whole.endswith(bridge):
            text = whole[len(opened) : len(whole) - len(bridge)]
        else:
            closed = self.render([*messages, turn], tools, is_closed=True)
            text = closed[self._encoder.find_split(opened, closed) :]
            text = text[: self._find_turn_end(text)]
        content = str(turn["content"])
        if content in text:
            return text
        return content + text if "tool_calls" in turn else content

    def _write_after(
        self, reply: Message, observation: Sequence[Message], arguments: Arguments
    ) -> BridgeText:
        context = [_make_question(), reply]
        pieces = self.write_prompt(context, observation, arguments=arguments)
        before = pieces[0].text
        after = _cut_after_reply(before)
        if after is None or QUESTION not in before[: len(before) - len(after)]:
            problem = "does not render a user's message and the reply to it before the next message"
            raise self._make_error([*context, *observation], problem)
        closing = self._closing
        if "tool_calls" in reply:
            closed = self.render(context, arguments=arguments, is_closed=True)
            tail = _cut_after_reply(closed) or ""
            # The end of a call belongs to the policy's turn: quotes, brackets, </tool_call>.
            length = self._find_turn_end(tail)
            if not after.startswith(tail[:length]):
                problem = "renders a tool call in another way once its result follows"
                raise self._make_error([*context, *observation], problem)
            closing, after = tail[length:], after[length:]
        length = self._measure_closing(closing, after)
        pieces[0] = TextPiece(after[length:], False)
        return BridgeText(after[:length], pieces)

    def _find_turn_end(self, text: str) -> int:
        """Return where the closing starts in text that ends with a turn."""
        if self._closing and text.endswith(self._closing):
            return len(text) - len(self._closing)
        # Some formats end a turn with calls by a token of its own (Llama 3's <|eom_id|>).
        return min((text.find(t) for t in self.end_texts if t in text), default=len(text))

    def _measure_closing(self, closing: str, scaffold: str) -> int:
        """Return how much of a scaffold closes the turn.

        closing: text that closes the turn if it is the last of the conversation. A template may
        close earlier turns with another token: then that token is the closing.
        """
        if scaffold.startswith(closing):
            return len(closing)
        if not closing.strip():
            return 0
        return self._encoder.find_special_end(scaffold)

    def write_conversation(
        self,
        messages: Sequence[Message],
        inserted: Sequence[int],
        tools: Sequence[ToolSchema] = (),
        arguments: Arguments = None,
    ) -> list[TextPiece]:
        """Render a conversation; return scaffold and observation in turn.

        inserted: ascending indices of the messages that are observations; the words of all others
        are scaffold. The observations are rendered one at a time, between markers. This finds each
        text even if it contains the scaffold, and as the template trims or escapes it.
        """
        markers = [f"{OBSERVATION}{number}x" for number in range(len(inserted))]
        marked = list(messages)
        for index, marker in zip(inserted, markers, strict=True):
            marked[index] = {**messages[index], "content": marker}
        skeleton = self.render(marked, tools, arguments)
        starts = _find_in_order(skeleton, markers)
        pieces, end = [], 0
        for index, marker, start in zip(inserted, markers, starts, strict=True):
            message = messages[index]
            if start < 0:
                problem = f"does not render the message of role {message['role']}"
                raise self._make_error(messages, problem)
            single = [*marked[:index], message, *marked[index + 1 :]]
            text = self.render(single, tools, arguments)
            before, after = skeleton[:start], skeleton[start + len(marker) :]
            pieces.append(TextPiece(skeleton[end:start], False))
            content = self._encoder.guard(message["content"])
            pieces.append(TextPiece(_cut_out(text, before, after, content), True))
            end = start + len(marker)
        pieces.append(TextPiece(skeleton[end:], False))
        return pieces

    def _make_error(self, messages: Sequence[Message], problem: str) -> ConfigError:
        roles = ", ".join(message["role"] for message in messages)
        return ConfigError(f"{self._template.name}: {problem} ({roles})")


def _make_question() -> Message:
    return {"role": "user", "content": QUESTION}


def _list_replies(results: Sequence[Message]) -> list[dict[str, Any]]:
    """Return possible assistant messages before tool results; some templates take one kind only."""
    spoken: dict[str, Any] = {"role": "assistant", "content": REPLY}
    if not results:
        return [spoken]
    # Without words: some templates show either words or calls, or the words after the results.
    return [{**spoken, "content": "", "tool_calls": _make_calls(results)}, spoken]


def _make_calls(results: Sequence[Message]) -> list[dict[str, Any]]:
    calls = (make_call(0, result["name"], {"argument": ARGUMENT}) for result in results)
    ids = (result["tool_call_id"] for result in results)
    return [{**call, "id": call_id} for call, call_id in zip(calls, ids, strict=True)]


def _cut_after_reply(text: str) -> str | None:
    """Return what follows the reply's text, or its last argument; None without either."""
    ends = [text.rfind(word) + len(word) for word in (REPLY, ARGUMENT) if word in text]
    return text[max(ends) :] if ends else None


def _find_in_order(text: str, words: Sequence[str]) -> list[int]:
    """Return the last occurrences of words that follow each other; -1 for one that is missing."""
    starts, end = [], len(text)
    for word in reversed(words):
        start = text.rfind(word, 0, end)
        starts.append(start)
        end = max(start, 0)
    return starts[::-1]


def _cut_out(text: str, before: str, after: str, content: str) -> str:
    """Return the part of a rendering between two scaffolds.

    If the scaffolds themselves depend on the content, as in templates that leave out an empty
    message, return the content as it is.
    """
    is_between = len(text) >= len(before) + len(after)
    if is_between and text.startswith(before) and text.endswith(after):
        return text[len(before) : len(text) - len(after)]
    return content
