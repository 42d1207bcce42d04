"""Byte-level tokenizers, and one with merges and the special tokens of well-known chat formats."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|return|>", "<|call|>", "<|end|>"),
)
PLAIN_ADDED_TOKENS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|User|>", "<|Assistant|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_output_begin|>", "<|tool_output_end|>"),
)
"""Added tokens that are not special, as in the tokenizers of Qwen and DeepSeek."""
NUM_MERGES = 1000


def make_byte_tokenizer(special, plain=(), **tokens):
    """Return a tokenizer with one token per byte, and these added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


@pytest.fixture(scope="session")
def bpe_backend():
    # Imported here: this module is a plugin of every test session.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False
    )
    # A part of the docs: training on all of them takes seconds.
    texts = [(DOCS / name).read_text() for name in ("architecture.md", "glossary.md")]
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.add_tokens([AddedToken(text, special=False) for text in PLAIN_ADDED_TOKENS])
    return backend.to_str()


@pytest.fixture(scope="session")
def make_bpe_tokenizer(bpe_backend):
    """Make a BPE tokenizer with the given BOS and EOS tokens, of SPECIAL_TOKENS."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    def make(eos_token, bos_token=None):
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(bpe_backend),
            eos_token=eos_token,
            bos_token=bos_token,
            pad_token="<|endoftext|>",
        )

    return make


@pytest.fixture(scope="session")
def bpe_tokenizer(make_bpe_tokenizer):
    """BPE tokenizer with 1000 merges; its EOS is <|im_end|>."""
    return make_bpe_tokenizer("<|im_end|>")
