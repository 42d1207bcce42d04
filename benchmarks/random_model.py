"""Random Qwen2 models of a given size, for measurements that depend only on the size."""

from pathlib import Path
from typing import Any

MAX_LENGTH = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

#: By millions of parameters: hidden size, MLP size, layers, heads, KV heads, vocabulary.
SHAPES = {
    1: (128, 512, 3, 4, 2, 1_000),
    10: (320, 1024, 6, 5, 1, 8_000),
    50: (512, 2048, 10, 8, 2, 24_000),
    200: (1024, 3072, 14, 16, 4, 32_000),
    400: (1024, 4096, 24, 16, 4, 32_000),
}


def make_model(millions: int, *, num_words: int | None = None, max_length: int = MAX_LENGTH) -> Any:
    """Make a float32 model in memory with tied embeddings and, if given, `num_words` tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, between, layers, heads, kv_heads, tokens = SHAPES[millions]
    config = Qwen2Config(
        vocab_size=num_words or tokens,
        hidden_size=width,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def write_model(
    millions: int, folder: Path, *, num_words: int | None = None, max_length: int = MAX_LENGTH
) -> str:
    """Write the model and a tokenizer of a few words; return the folder for vLLM."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = make_model(millions, num_words=num_words, max_length=max_length)
    model.save_pretrained(folder)
    # Words must not start with a special token: the tokenizer would split them.
    words = [*SPECIAL_TOKENS, *(f"t{i}" for i in range(len(SPECIAL_TOKENS), num_words or 64))]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    return str(folder)
