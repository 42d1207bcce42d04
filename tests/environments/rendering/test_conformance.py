import pytest

from streamrl.environments.episodes.check_environment import check_template, describe_difference
from streamrl.errors import ConfigError


def test_the_report_names_the_first_token_of_a_dropped_thought(load_renderer):
    renderer = load_renderer("qwen3")
    differences = check_template(renderer)
    prompt = renderer.render_prompt([{"role": "user", "content": "Find the words."}])
    start = f"token {len(prompt)}: the template renders 'The"
    assert differences["thoughts"].startswith(start)
    assert "the stream has '<think" in differences["thoughts"]


TURN = "{{ '<|' + m.role + '|>' + m.content + '<eos>' }}"
OPEN = "<|assistant|>"
LOOP = "{% for m in MESSAGES %}" + TURN + "{% endfor %}" + OPEN
REFUSE = "{% if m.role == 'assistant' %}{{ raise_exception('no assistant') }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (
            LOOP.replace("MESSAGES", "messages[-1:]"),
            "not render a user's message and the reply to it",
        ),
        (
            LOOP.replace("MESSAGES", "messages|rejectattr('role', 'equalto', 'user')"),
            "not render the message of role user",
        ),
        (
            LOOP.replace("MESSAGES", "messages").replace(TURN, REFUSE + TURN),
            "refuses the prompt: TemplateError: no assistant",
        ),
        (
            LOOP.replace("MESSAGES", "(messages[-3:] if messages|length > 3 else messages)"),
            "not render",
        ),
        (LOOP.replace("MESSAGES", "messages|sort(attribute='content')"), "not render"),
    ],
    ids=["last message", "no user", "raises", "last messages", "sorted"],
)
def test_a_template_that_does_not_render_a_conversation_in_order_is_refused(
    make_renderer, source, error
):
    with pytest.raises(ConfigError, match=rf"(?s)mine\.jinja.*{error}"):
        check_template(make_renderer(source))


def test_the_first_difference_may_be_the_end_of_either_side(bpe_tokenizer):
    end = bpe_tokenizer.eos_token_id
    assert describe_difference(bpe_tokenizer, [5, end], [5, end]) == ""
    longer = describe_difference(bpe_tokenizer, [5], [5, end])
    assert longer == "token 1: the template renders nothing, the stream has '<|im_end|>'"
    shorter = describe_difference(bpe_tokenizer, [5, end], [5])
    assert shorter == "token 1: the template renders '<|im_end|>', the stream has nothing"
