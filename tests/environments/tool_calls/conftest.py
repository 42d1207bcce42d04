"""Tokenizers with the families' markers as tokens, and without any."""

import functools

import pytest

from streamrl.environments.tool_calls.call_formats import HARMONY_MARKERS
from tests.bpe_tokenizer import make_byte_tokenizer

SPECIAL = (
    *("<|im_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *HARMONY_MARKERS,
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Added tokens that Qwen's tokenizers do not call special, so that decoding keeps them."""


@pytest.fixture(scope="session")
def marker_tokenizer():
    """Tokenizer of bytes in which every marker of every family is one token."""
    return make_byte_tokenizer(SPECIAL, NOT_SPECIAL, eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def plain_tokenizer():
    """Tokenizer of bytes in which markers are ordinary characters."""
    return make_byte_tokenizer(["<|im_end|>"], [], eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def encode(marker_tokenizer):
    """Encode text; markers become their tokens."""
    return functools.partial(marker_tokenizer.encode, add_special_tokens=False)


@pytest.fixture(scope="session")
def encode_chars(encode):
    """Encode each character on its own, so that markers are only spelled."""
    return lambda text: [token for char in text for token in encode(char)]
