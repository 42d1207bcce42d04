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
from streamrl.environments.interface import Message, ToolSchema
from streamrl.environments.rendering.token_difference import encode, find_difference
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Letters and digits only: no template trims or escapes them.
QUESTION, REPLY, ARGUMENT, OBSERVATION = "Question7bx", "Reply7bx", "Argument7bx", "Observation7bx"
"""Marker words in place of the contents of a synthetic conversation."""
Arguments = Mapping[str, Any] | None


class TextPiece(NamedTuple):
    """Piece of a rendering, either of the template or of the environment."""

    text: str
    is_observation: bool


class BridgeText(NamedTuple):
    """Text between two sampled turns.

    pieces: scaffold, observation, scaffold, ..., observation, scaffold.
    closing_length: characters of the first scaffold that close the sampled turn.
    """

    pieces: Sequence[TextPiece]
    closing_length: int


class BridgeWriter:
    """Writer of bridges and prompts as text.

    end_texts: texts of the tokens that end a turn. Raises ConfigError for a template from which the
    text around a user's message after a turn cannot be derived.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: ChatTemplate,
        end_texts: Iterable[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._end_texts = tuple(end_texts)
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
        bridge = "".join(piece.text for piece in self.write_bridge(observation).pieces)
        if whole.startswith(opened) and whole.endswith(bridge):
            text = whole[len(opened) : len(whole) - len(bridge)]
        else:
            closed = self.render([*messages, turn], tools, is_closed=True)
            pairs = enumerate(zip(opened, closed, strict=False))
            start = next((i for i, (a, b) in pairs if a != b), min(len(opened), len(closed)))
            text = closed[start:]
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
            raise self._make_error(context, observation, problem)
        closing = self._closing
        if "tool_calls" in reply:
            closed = self.render(context, arguments=arguments, is_closed=True)
            tail = _cut_after_reply(closed) or ""
            # The end of a call belongs to the policy's turn: quotes, brackets, </tool_call>.
            length = self._find_turn_end(tail)
            if not after.startswith(tail[:length]):
                problem = "renders a tool call in another way once its result follows"
                raise self._make_error(context, observation, problem)
            closing, after = tail[length:], after[length:]
        pieces[0] = TextPiece(after, False)
        return BridgeText(pieces, self._measure_closing(closing, after))

    def _find_turn_end(self, text: str) -> int:
        """Return where the closing starts in text that ends with a turn."""
        if self._closing and text.endswith(self._closing):
            return len(text) - len(self._closing)
        # Some formats end a turn with calls by a token of its own (Llama 3's <|eom_id|>).
        return min((text.find(t) for t in self._end_texts if t in text), default=len(text))

    def _measure_closing(self, closing: str, scaffold: str) -> int:
        """Return how much of a scaffold closes the turn.

        closing: text that closes the turn if it is the last of the conversation. A template may
        close earlier turns with another token: then that token is the closing.
        """
        if scaffold.startswith(closing):
            return len(closing)
        if not closing.strip():
            return 0
        encoding: Mapping[str, Any] = self._tokenizer(
            scaffold, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        special = {i for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        tokens = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        return next((stop for token, (_, stop) in tokens if token in special), 0)

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
                raise self._make_error(marked[: inserted[0]], marked[inserted[0] :], problem)
            single = [*marked[:index], message, *marked[index + 1 :]]
            text = self.render(single, tools, arguments)
            before, after = skeleton[:start], skeleton[start + len(marker) :]
            pieces.append(TextPiece(skeleton[end:start], False))
            pieces.append(TextPiece(_cut_out(text, before, after, message["content"]), True))
            end = start + len(marker)
        pieces.append(TextPiece(skeleton[end:], False))
        return pieces

    def _make_error(
        self, context: Sequence[Message], observation: Sequence[Message], problem: str
    ) -> ConfigError:
        """Return an error that names the first token at which template and stream part."""
        if context[-1]["role"] == "assistant":
            stream = self.render(context[:-1]) + context[-1]["content"] + self._closing
        else:
            stream = self.render(context, is_closed=True)
        stream += observation[0]["content"]
        rendered = self.render([*context, *observation])
        tokenizer = self._tokenizer
        difference = find_difference(
            tokenizer, encode(tokenizer, rendered), encode(tokenizer, stream)
        )
        roles = ", ".join(message["role"] for message in (*context, *observation))
        return ConfigError(f"{self._template.name}: {problem} ({roles}; {difference})")


def _make_question() -> Message:
    return {"role": "user", "content": QUESTION}


def _list_replies(results: Sequence[Message]) -> list[dict[str, Any]]:
    """Return possible assistant messages before tool results; some templates take one kind only."""
    spoken: dict[str, Any] = {"role": "assistant", "content": REPLY}
    if not results:
        return [spoken]
    replies = []
    # Most templates render arguments as JSON; DeepSeek's concatenates them as text.
    for arguments in ({"argument": ARGUMENT}, ARGUMENT):
        calls = [
            {
                "id": result["tool_call_id"],
                "type": "function",
                "function": {"name": result["name"], "arguments": arguments},
            }
            for result in results
        ]
        replies.append({**spoken, "tool_calls": calls})
    return [*replies, spoken]


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
