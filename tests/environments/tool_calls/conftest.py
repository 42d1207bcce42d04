"""Tokenizers with the families' markers as tokens, and without any."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from streamrl.environments.tool_calls.call_formats import HARMONY_MARKERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEEPSEEK_MARKERS = (
    *("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep"),
)
SPECIAL = (
    *("<|im_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *HARMONY_MARKERS,
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>",),
    *(f"<\uff5ctool\u2581{name}\uff5c>" for name in DEEPSEEK_MARKERS),
)
NOT_SPECIAL = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""Added tokens that Qwen's tokenizers do not call special, so that decoding keeps them."""
TEXT = """The tool adds numbers: {"name": "add", "arguments": {"a": 1, "b": 2}} and returns text."""
Encode = Callable[[str], list[int]]


def make_tokenizer(special: Sequence[str], not_special: Sequence[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in not_special])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def marker_tokenizer() -> "PreTrainedTokenizerFast":
    """Byte-level BPE in which every marker of every family is one token."""
    return make_tokenizer(SPECIAL, NOT_SPECIAL)


@pytest.fixture(scope="session")
def plain_tokenizer() -> "PreTrainedTokenizerFast":
    """Byte-level BPE in which markers are ordinary characters."""
    return make_tokenizer(("<|im_end|>",), ())


@pytest.fixture(scope="session")
def encode(marker_tokenizer: Any) -> Encode:
    """Encode text; markers become their tokens."""
    return lambda text: list(marker_tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="session")
def encode_chars(marker_tokenizer: Any) -> Encode:
    """Encode each character on its own, so that markers are only spelled."""
    return lambda text: [
        token for char in text for token in marker_tokenizer.encode(char, add_special_tokens=False)
    ]
