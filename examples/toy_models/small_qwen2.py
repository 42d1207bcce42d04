"""Build a small Qwen2 with a character tokenizer, as a Hugging Face directory."""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

MAX_TOKENS = 256
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=().,:;?!<>[]'\"_#%"
# OPENING is replaced by the text that opens the assistant's turn, in history and generation prompt.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- 'OPENING' + message.content + eos_token }}"
    "{%- else %}{{- message.content }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'OPENING' }}{%- endif %}"
)
# Template for many turns. A line for each tool, with its name, and for each message of user, system
# and tool; a turn of the assistant ends with EOS; a call is written as its arguments. Appending a
# message never changes the text before it.
TURNS_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for tool in tools or [] %}{{- tool.function.name + '\\n' }}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<call>' + call.function.arguments.values() | join(',') + '</call>' }}"
    "{%- endfor %}"
    "{{- eos_token }}"
    "{%- else %}{{- message.content + '\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
)


def make_tokenizer(
    opening: str = "=", chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of 64 single characters; all ids decode, so that each sample has a text.

    opening: text of the chat template before the assistant's message.
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
        chat_template=chat_template.replace("OPENING", opening),
        model_max_length=MAX_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_turns_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer whose chat template has many turns."""
    return make_tokenizer(chat_template=TURNS_TEMPLATE)


def make_untrained(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, hidden_size: int = 128
) -> Qwen2ForCausalLM:
    """Build a Qwen2 with random parameters, 0.5 M by default, and 32 dimensions per head."""
    special_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        **special_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    # top_k 0: samples follow the model's probabilities.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, **special_ids
    )
    return model


def save_model(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config, weights, generation config and tokenizer."""
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
