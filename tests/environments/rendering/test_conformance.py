import pytest

from streamrl.environments.rendering.conformance import check_template, describe_difference
from streamrl.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("qwen2_5", set()),
        ("qwen3", {"thoughts"}),
        ("llama3", {"whitespace around a text", "thoughts before tool calls"}),
        ("mistral", {"user message after a tool", "thoughts before tool calls"}),
        ("gemma", {"whitespace around a text"}),
        ("deepseek", {"thoughts", "thoughts before tool calls"}),
        ("plain", set()),
        ("toy", set()),
    ],
)
def test_kinds_of_conversation_that_a_chat_format_rewrites(load_renderer, name, differences):
    assert set(check_template(load_renderer(name))) == differences


def test_the_report_names_the_first_token_of_a_dropped_thought(load_renderer):
    renderer = load_renderer("qwen3")
    differences = check_template(renderer)
    prompt = renderer.render_prompt([{"role": "user", "content": "Find the words."}])
    start = f"token {len(prompt)}: the template renders 'The"
    assert differences["thoughts"].startswith(start)
    assert "the stream has '<think" in differences["thoughts"]


TURN = "{{ '<|' + m.role + '|>' + m.content + '<eos>' }}"
OPEN = "<|assistant|>"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (
            "{% set m = messages[-1] %}" + TURN + OPEN,
            "does not render a user's message and the reply to it",
        ),
        (
            "{% for m in messages|rejectattr('role', 'equalto', 'user') %}"
            + TURN
            + "{% endfor %}"
            + OPEN,
            "does not render the message of role user",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            "{{ raise_exception('no assistant') }}{% endif %}" + TURN + "{% endfor %}" + OPEN,
            "refuses the prompt: TemplateError: no assistant",
        ),
    ],
    ids=["last message", "no user", "raises"],
)
def test_a_template_without_derivable_bridges_is_refused(make_renderer, source, error):
    with pytest.raises(ConfigError, match=rf"(?s)mine\.jinja.*{error}") as caught:
        make_renderer(source)
    assert "user, assistant" in str(caught.value)


@pytest.mark.parametrize(
    "messages",
    ["(messages[-3:] if messages|length > 3 else messages)", "messages|sort(attribute='content')"],
    ids=["last messages", "sorted"],
)
def test_a_template_that_loses_the_order_of_longer_conversations_is_refused(
    make_renderer, messages
):
    source = f"{{% for m in {messages} %}}{TURN}{{% endfor %}}{OPEN}"
    with pytest.raises(ConfigError, match=r"mine\.jinja: does not render "):
        check_template(make_renderer(source))


def test_the_first_difference_may_be_the_end_of_either_side(bpe_tokenizer):
    end = bpe_tokenizer.eos_token_id
    assert describe_difference(bpe_tokenizer, [5, end], [5, end]) == ""
    longer = describe_difference(bpe_tokenizer, [5], [5, end])
    assert longer == "token 1: the template renders nothing, the stream has '<|im_end|>'"
    shorter = describe_difference(bpe_tokenizer, [5, end], [5])
    assert shorter == "token 1: the template renders '<|im_end|>', the stream has nothing"
