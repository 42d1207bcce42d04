"""Prompts: read from a file, rendered to tokens once, then streamed epoch after epoch."""

from streamrl.data.prompts import DataConfig, LoadedPrompts, load_prompts
from streamrl.data.rendering import load_tokenizer, load_vocab_size
from streamrl.data.rows import TEXT_PROMPT, Row, load_rows
from streamrl.data.stream import PromptStream

__all__ = [
    "TEXT_PROMPT",
    "DataConfig",
    "LoadedPrompts",
    "PromptStream",
    "Row",
    "load_prompts",
    "load_rows",
    "load_tokenizer",
    "load_vocab_size",
]
