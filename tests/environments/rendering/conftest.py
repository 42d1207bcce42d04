"""Renderers of well-known chat formats, with templates written for these tests."""

import functools
from pathlib import Path

import pytest

from streamrl.data.chat_template import ChatTemplate, load_chat_template
from streamrl.environments.rendering.turn_renderer import TurnRenderer

TEMPLATES = Path(__file__).parent / "templates"
TOKENS = {
    "qwen2_5": ("<|im_end|>", None),
    "qwen3": ("<|im_end|>", None),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>"),
    "mistral": ("</s>", "<s>"),
    "gemma": ("<eos>", "<bos>"),
    "deepseek": ("</s>", "<s>"),
}
"""EOS and BOS of the formats; Gemma's turns end with <end_of_turn>, not with its EOS."""


@pytest.fixture(scope="session")
def load_renderer(make_bpe_tokenizer):
    """Load the renderer of a format: a file in templates/, "plain" or "toy"."""

    @functools.cache
    def load(name):
        if name == "toy":
            from examples.toy_models.small_qwen2 import make_tokenizer

            tokenizer = make_tokenizer()
            return TurnRenderer(tokenizer, load_chat_template("model", tokenizer))
        tokenizer = make_bpe_tokenizer(*TOKENS.get(name, ("<eos>", "<bos>")))
        source = "plain" if name == "plain" else str(TEMPLATES / f"{name}.jinja")
        return TurnRenderer(tokenizer, load_chat_template(source, tokenizer))

    return load


@pytest.fixture
def make_renderer(make_bpe_tokenizer):
    """Make a renderer of a template's text."""

    def make(source, *, eos_token="<eos>", name="mine.jinja", **settings):
        tokenizer = make_bpe_tokenizer(eos_token, "<bos>")
        ends = [tokenizer.convert_tokens_to_ids(t) for t in settings.pop("end_tokens", ())]
        template = ChatTemplate(source, name, **settings)
        return TurnRenderer(tokenizer, template, end_token_ids=ends)

    return make
