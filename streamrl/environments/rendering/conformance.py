"""Comparison of appended streams with whole renderings of the same conversations.

    differences = check_template(TurnRenderer(tokenizer, template))
    differences["thoughts"]

A template that rewrites earlier turns, by dropping thoughts or trimming whitespace, is no error:
the stream keeps what the policy sampled. The result names the first token of each difference.
"""

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from streamrl.environments.interface import Message, ToolSchema
from streamrl.environments.rendering.bridge_text import decode
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.reply_text import make_call, make_call_id
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_TOKENS = 6
KEPT = "Differences are kept as sampled: the policy is trained on the tokens it saw."
REWRITTEN = "Where more than whitespace differs, the next turn begins a new sample of the episode."
USER_MESSAGES, TOOL_CALL = "user messages", "one tool call"
LOOK_UP: ToolSchema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
"""Tool of the conversations with tool calls."""


def list_template_notes(renderer: TurnRenderer, max_samples: int) -> list[str]:
    """Return each difference, and what becomes of it, given the most samples of an episode."""
    treatment = KEPT
    if max_samples > 1:
        treatment = f"{REWRITTEN} After environment.max_samples={max_samples}, turns are appended."
    return [
        f"chat template, {kind}: {difference}. {treatment}"
        for kind, difference in check_template(renderer).items()
    ]


def check_template(renderer: TurnRenderer) -> dict[str, str]:
    """Compare stream and rendering of generated conversations of each kind.

    Returns the first different token of each kind whose stream is not the rendering. Raises
    ConfigError for a template that refuses, drops or reorders messages of the user and replies to
    them, or whose turns hold a token that ends turns. Other kinds may be refused; environments then
    must not use them.
    """
    name, tokenizer = renderer.template.name, renderer.tokenizer
    if renderer.early_ends:
        raise ConfigError(
            f"{name}: writes {', '.join(renderer.early_ends)} within a turn, a token that ends"
            " turns by eos_token_id of generation_config.json or eos_token of the tokenizer; remove"
            " it there, or choose the template of the model"
        )
    end_texts = [decode(tokenizer, [token]) for token in sorted(renderer.end_token_ids)]
    conversations = make_conversations(" ".join(["see", *end_texts, "there"]))
    differences: dict[str, str] = {}
    for kind, messages in conversations.items():
        try:
            if difference := _compare(renderer, kind, messages):
                differences[kind] = difference
        except ConfigError:
            if kind == USER_MESSAGES:
                raise
    return differences


def make_conversations(special_text: str) -> dict[str, list[Message]]:
    """Return a conversation of each kind, ending with an observation."""

    def user(content: str) -> Message:
        return {"role": "user", "content": content}

    def assistant(content: str) -> Message:
        return {"role": "assistant", "content": content}

    call, results = _make_call, _make_results
    thought = "<think>\nLet me see.\n</think>\n\n"
    ask = [user("Find the words.")]
    plain = [assistant("I know the first."), user("Go on."), assistant("And the second.")]
    return {
        USER_MESSAGES: [*ask, *plain, user("Done?")],
        TOOL_CALL: [*ask, call("one"), *results("1"), call("two"), *results("2\n3")],
        "several tool calls": [*ask, call("one", "two"), *results("1", "2")],
        "user message after a tool": [*ask, call("one"), *results("1"), *plain, user("Done?")],
        "thoughts": [
            *(*ask, assistant(thought + "The first."), user("Go on.")),
            *(assistant(thought + "The second."), user("Done?")),
        ],
        "thoughts before tool calls": [
            *(*ask, call("one", content=thought), *results("1")),
            *(call("two", content=thought), *results("2")),
        ],
        "text beyond ASCII": [*ask, assistant("\u00dcber \u4f60\u597d"), user("\u00e9\U0001f600")],
        "whitespace around a text": [
            *(*ask, assistant("The first. \n"), user("  Go on.\n\n")),
            *(assistant("The second."), user("\nDone? ")),
        ],
        "empty observation": [*ask, assistant("The first."), user("")],
        "empty tool result": [*ask, call("one"), *results("")],
        "special tokens as text": [*ask, assistant("The first."), user(special_text)],
        "system message": [
            *(*ask, assistant("The first."), {"role": "system", "content": "Time is short."})
        ],
    }


def _make_call(*words: str, content: str = "") -> Message:
    calls = [make_call(number, "look_up", {"word": word}) for number, word in enumerate(words)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _make_results(*contents: str) -> list[Message]:
    return [
        {"role": "tool", "name": "look_up", "tool_call_id": make_call_id(number), "content": text}
        for number, text in enumerate(contents)
    ]


def describe_difference(
    tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[int], appended: Sequence[int]
) -> str:
    """Describe the first different token of a template's rendering and a stream; "" if equal."""
    for index, (one, other) in enumerate(zip_longest(rendered, appended)):
        if one != other:
            ids = (tokens[index : index + SHOWN_TOKENS] for tokens in (rendered, appended))
            left, right = (repr(decode(tokenizer, i)) if len(i) else "nothing" for i in ids)
            return f"token {index}: the template renders {left}, the stream has {right}"
    return ""


def _compare(renderer: TurnRenderer, kind: str, messages: Sequence[Message]) -> str:
    has_tools = any(message["role"] == "tool" for message in messages)
    # Without a place for tools in the prompt, a template may have tool results all the same.
    tools = [LOOK_UP] if has_tools and renderer.template.can_render_tools else []
    rendered = renderer.get_writer(has_tools=has_tools).render(messages, tools)
    tokenizer = renderer.tokenizer
    appended = append_turns(renderer, messages, tools)
    difference = describe_difference(tokenizer, renderer.encoder.encode(rendered), appended)
    in_order = ".*".join(re.escape(message["content"]) for message in messages)
    if kind == USER_MESSAGES and not re.search(in_order, rendered, re.DOTALL):
        raise ConfigError(
            f"{renderer.template.name}: does not render all messages of user and assistant, in"
            f" their order ({kind}; {difference})"
        )
    return difference


def append_turns(
    renderer: TurnRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> list[int]:
    """Return the stream of a conversation whose replies the policy samples.

    The policy closes every other turn; the others are cut.
    """
    has_tools = any(message["role"] == "tool" for message in messages)
    writer = renderer.get_writer(has_tools=has_tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    stream = renderer.render_prompt(messages[: turns[0]], tools).tolist()
    for number, (turn, end) in enumerate(zip(turns, [*turns[1:], len(messages)], strict=True)):
        observation = messages[turn + 1 : end]
        text = writer.write_turn(messages[:turn], messages[turn], observation, tools)
        sampled = renderer.encoder.encode(text)
        # Turns with calls may close by another token than `closing_ids`.
        is_cut = "tool_calls" in messages[turn] or number % 2 == 1 or not renderer.closing_ids
        sampled += [] if is_cut else renderer.closing_ids
        bridge = renderer.render_bridge(sampled, observation, is_cut=is_cut, has_tools=has_tools)
        stream += [*sampled, *bridge.token_ids.tolist()]
    return stream
