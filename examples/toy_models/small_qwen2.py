"""A small Qwen2 with a tokenizer of single characters, as a Hugging Face directory."""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

MAX_TOKENS = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=().,:;?!<>[]'\"_#%"
# OPENING stands for what opens the assistant's turn, in the history as in the generation prompt.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- 'OPENING' + message.content + eos_token }}"
    "{%- else %}{{- message.content }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'OPENING' }}{%- endif %}"
)


def make_tokenizer(opening: str = "=") -> PreTrainedTokenizerFast:
    """One token per character: 64 ids, and every one decodes, so any sample has a text.

    `opening` is what the chat template writes before what the assistant says.
    """
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE.replace("OPENING", opening),
        model_max_length=MAX_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_untrained(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 of 0.5 M parameters with random weights; its heads have 32 dimensions."""
    special_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        **special_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    # top_k 0 is no cut: what is sampled follows the model's own probabilities.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, **special_ids
    )
    return model


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config, weights, generation config and tokenizer."""
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
