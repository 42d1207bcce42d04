"""Comparison of appended streams with whole renderings of the same conversations.

    results = check_template(TurnRenderer.from_template(tokenizer, template))
    print("\\n".join(format_report(results)))

A template that rewrites earlier turns, by dropping thoughts or trimming whitespace, is no error:
the stream keeps what the policy sampled. The report names the first token of each difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.environments.interface import Message, ToolSchema
from streamrl.environments.rendering.token_difference import (
    TokenDifference,
    decode,
    find_difference,
)
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.errors import ConfigError

KEPT = "Differences are kept as sampled: the policy is trained on the tokens it saw."
REWRITTEN = "Where more than whitespace differs, the next turn begins a new sample of the episode."
USER_MESSAGES, TOOL_CALL, SPECIAL_TEXT = "user messages", "one tool call", "special tokens as text"
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


@dataclass(frozen=True)
class ConformanceResult:
    """Comparison of a kind of conversation.

    difference: the first different token; None if stream and rendering are identical. unsupported:
    why the template does not take such a conversation; "" if it does.
    """

    kind: str
    difference: TokenDifference | None = None
    unsupported: str = ""


@dataclass(frozen=True)
class ConformanceReport:
    """Results of a template, one for each kind of conversation."""

    template: str
    results: Sequence[ConformanceResult]

    @property
    def differences(self) -> Mapping[str, TokenDifference]:
        """First different token of each kind in which the stream is not the rendering."""
        return {r.kind: r.difference for r in self.results if r.difference is not None}


def describe_treatment(max_samples: int) -> str:
    """Return what becomes of differences, given the most samples of an episode."""
    if max_samples == 1:
        return KEPT
    return f"{REWRITTEN} After environment.max_samples={max_samples}, turns are appended."


def check_template(renderer: TurnRenderer) -> ConformanceReport:
    """Compare stream and rendering of generated conversations of each kind.

    Raises ConfigError for a template that refuses, drops or reorders messages of the user and
    replies to them, or whose turns hold a token that ends turns. Other kinds may be unsupported;
    environments then must not use them.
    """
    _check_whole_turn(renderer)
    tokenizer = renderer.tokenizer
    end_texts = [decode(tokenizer, [token]) for token in sorted(renderer.end_token_ids)]
    special_text = " ".join(["see", *end_texts, "there"])
    conversations = make_conversations(special_text)
    results = [_check_kind(renderer, kind, turns) for kind, turns in conversations.items()]
    return ConformanceReport(renderer.template.name, results)


def _check_whole_turn(renderer: TurnRenderer) -> None:
    """Raise ConfigError if a turn of thought, calls and answer would end before its end."""
    if renderer.early_ends:
        raise ConfigError(
            f"{renderer.template.name}: writes {', '.join(renderer.early_ends)} within a turn, a"
            " token that ends turns by eos_token_id of generation_config.json or eos_token of the"
            " tokenizer; remove it there, or choose the template of the model"
        )


def _check_kind(
    renderer: TurnRenderer, kind: str, messages: Sequence[Message]
) -> ConformanceResult:
    try:
        return ConformanceResult(kind, _compare(renderer, kind, messages))
    except ConfigError as error:
        if kind == USER_MESSAGES:
            raise
        return ConformanceResult(kind, unsupported=str(error))


def format_report(report: ConformanceReport) -> list[str]:
    """Return lines for a console: each kind of conversation, and what becomes of differences."""
    width = max(len(result.kind) for result in report.results)
    lines = [f"Turns appended by {report.template}, compared with whole renderings:"]
    for result in report.results:
        if result.unsupported:
            outcome = f"not supported: {result.unsupported}"
        elif result.difference:
            outcome = f"differs at {result.difference}"
        else:
            outcome = "identical"
        lines.append(f"  {result.kind:{width}}  {outcome}")
    return [*lines, KEPT] if report.differences else lines


def make_conversations(special_text: str) -> dict[str, list[Message]]:
    """Return a conversation of each kind, ending with an observation."""
    user, assistant, call, results = _make_user, _make_assistant, _make_call, _make_results
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
        SPECIAL_TEXT: [*ask, assistant("The first."), user(special_text)],
        "system message": [
            *(*ask, assistant("The first."), {"role": "system", "content": "Time is short."})
        ],
    }


def _make_user(content: str) -> Message:
    return {"role": "user", "content": content}


def _make_assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _make_call(*words: str, content: str = "") -> Message:
    calls: list[dict[str, Any]] = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {
                "name": "look_up",
                "arguments": {"word": word},
            },
        }
        for number, word in enumerate(words)
    ]
    return {**_make_assistant(content), "tool_calls": calls}


def _make_results(*contents: str) -> list[Message]:
    return [
        {"role": "tool", "name": "look_up", "tool_call_id": f"call{number:05}", "content": content}
        for number, content in enumerate(contents)
    ]


def _compare(
    renderer: TurnRenderer, kind: str, messages: Sequence[Message]
) -> TokenDifference | None:
    has_tools = any(message["role"] == "tool" for message in messages)
    # Without a place for tools in the prompt, a template may have tool results all the same.
    tools = [LOOK_UP] if has_tools and renderer.template.can_render_tools else []
    rendered = renderer.get_writer(has_tools=has_tools).render(messages, tools)
    tokenizer = renderer.tokenizer
    appended = append_turns(renderer, messages, tools)
    difference = find_difference(tokenizer, renderer.encoder.encode(rendered), appended)
    if kind == USER_MESSAGES and not _is_in_order(rendered, messages):
        raise ConfigError(
            f"{renderer.template.name}: does not render all messages of user and assistant, in"
            f" their order ({kind}; {difference})"
        )
    return difference


def _is_in_order(text: str, messages: Sequence[Message]) -> bool:
    position = 0
    for message in messages:
        position = text.find(message["content"], position)
        if position < 0:
            return False
        position += len(message["content"])
    return True


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
