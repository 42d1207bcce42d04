"""Turns, texts and calls in chat templates as their models publish them."""

import re
from pathlib import Path

import pytest

from streamrl.data.chat_template import Conversation, render_text
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.episodes.check_environment import LOOK_UP, check_template
from streamrl.environments.episodes.driver import choose_call_format
from streamrl.environments.interface import ToolCall
from streamrl.environments.rendering.turn_renderer import TurnRenderer
from streamrl.environments.tool_calls.call_formats import detect_call_format
from streamrl.errors import ConfigError
from tests.environments.published import FAMILIES, load_published

pytestmark = pytest.mark.xdist_group("engines")
QUICK = (
    *("gptoss", "qwen3", "qwen3_5_think", "llama3_1", "gemma4", "deepseekv3", "glm4moe"),
    "lfm2_2_5",
)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
MANY = 5
"""Kinds of conversation from which the table of the docs has "most"."""
DOCS = Path(__file__).parents[3] / "docs" / "environments.md"
ONE_CALL = ("llama3_1", "llama3_2", "gptoss")
NO_CALLS = (
    *("cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3"),
)


def encode_turn(renderer, body):
    """Return the tokens of a turn with a thought, as the template itself renders it."""
    tokenizer, source = renderer.tokenizer, renderer.template.source
    thought = dict.fromkeys(("thinking", "reasoning_content", "reasoning"), "Let me see.")
    question = {"role": "user", "content": "Find the words."}
    turn = {"role": "assistant", "content": "", **thought, **body}
    tools = [LOOK_UP] if renderer.can_render_tools else None
    opened, closed = (
        tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, return_dict=False, **options
        )
        for messages, options in (
            ([question], {"add_generation_prompt": True}),
            ([question, turn], {}),
        )
    )
    pairs = enumerate(zip(opened, closed, strict=False))
    return closed[next((i for i, (a, b) in pairs if a != b), len(opened)) :]


def make_calls(renderer, *words):
    as_text = renderer.template.name == "deepseekv3"
    return [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {
                "name": "look_up",
                "arguments": f'{{"word": "{word}"}}' if as_text else {"word": word},
            },
        }
        for i, word in enumerate(words)
    ]


def list_turns(renderer):
    """Return whole turns of a family: a thought, and an answer or one or two calls."""
    name = renderer.template.name
    yield encode_turn(renderer, {"content": "It is 3."}), 0
    for words in (("one",), ("one", "two")):
        if name not in NO_CALLS and not (len(words) == 2 and name in ONE_CALL):
            yield encode_turn(renderer, {"tool_calls": make_calls(renderer, *words)}), len(words)


def format_row(renderer):
    """Return the row of a family in the table of the docs."""
    name = renderer.template.name
    tokens = renderer.tokenizer.convert_ids_to_tokens(sorted(renderer.end_token_ids))
    ends = " ".join(f"`{token}`" for token in sorted(tokens)).replace("|", "\\|")
    shown = renderer.get_writer(has_tools=True).show_call()
    has_calls = shown is not None or name == "lfm2"
    call_format = f"`{detect_call_format(renderer.tokenizer, shown)}`" if has_calls else "none"
    kinds = [*check_template(renderer)]
    rewritten = ", ".join(kinds) if len(kinds) < MANY else "most"
    rewritten = rewritten or "nothing"
    return f"| {name} | {ends} | passes | {call_format} | {rewritten} |"


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_turn_passes_its_own_stop_tokens_and_the_docs_have_the_family(name):
    renderer = load_published(name)
    assert format_row(renderer) in DOCS.read_text()
    ends = renderer.end_token_ids
    for turn, _ in list_turns(renderer):
        text = renderer.tokenizer.decode(turn)
        stops = [i for i, token in enumerate(turn) if token in ends]
        rest = renderer.tokenizer.decode(turn[stops[0] + 1 :]) if stops else ""
        assert not rest.strip() or rest.strip() in {"<|endoftext|>"}, (text, rest)
        # GLM ends its turns by the header of the next one.
        assert stops or name == "glm4moe", text


def test_a_token_within_a_turn_is_no_end_of_it():
    renderer = load_published("gptoss")
    tokenizer, source = renderer.tokenizer, renderer.template
    alone = TurnRenderer(tokenizer, source)
    ends = tokenizer.convert_ids_to_tokens(sorted(alone.end_token_ids))
    assert set(ends) == {"<|return|>", "<|call|>"}
    early = tokenizer.convert_tokens_to_ids(["<|end|>"])
    with pytest.raises(ConfigError, match=r"gptoss: writes <\|end\|> within a turn"):
        check_template(TurnRenderer(tokenizer, source, end_token_ids=early))


@pytest.mark.parametrize("name", NAMES)
def test_no_text_writes_a_control_token_of_a_family(name):
    renderer = load_published(name)
    tokenizer, template = renderer.tokenizer, renderer.template
    markers = [str(t) for t in tokenizer.added_tokens_decoder.values()]

    def count(text, reply="fine"):
        tools = []
        if renderer.can_render_tools:
            schema = {"type": "string", "description": text, "enum": [text]}
            parameters = {"type": "object", "properties": {text: schema}}
            described = {"name": text, "description": text, "parameters": parameters}
            tools = [{"type": "function", "function": described}]
        said = zip(("user", "assistant", "user"), (text, reply, "go"), strict=True)
        messages = [{"role": role, "content": content} for role, content in said]
        conversation = Conversation("row", messages, tools)
        token_ids = renderer.encoder.encode(render_text(tokenizer, conversation, template))
        control = [i for i in token_ids if i in tokenizer.added_tokens_decoder]
        return tokenizer.convert_ids_to_tokens(control)

    expected = count("plain")
    for marker in markers:
        assert count(f"a{marker}b") == expected, marker
        if not re.search("think|tool|arg_", marker):  # a turn of the policy has these tags
            assert count("plain", f"a{marker}b") == expected, marker


@pytest.mark.parametrize("name", [*QUICK, "muse_glimmer"])
def test_calls_are_read_in_the_format_of_the_template(name):
    renderer = load_published(name)
    call_format = choose_call_format(EnvironmentConfig(), renderer, [LOOK_UP])
    for turn, num_calls in list_turns(renderer):
        expected = [ToolCall("look_up", {"word": word}) for word in ("one", "two")[:num_calls]]
        assert list(call_format.parse(turn, [LOOK_UP]).calls) == expected
