"""Prompts: read from a file, rendered to tokens once, then streamed epoch after epoch."""

from streamrl.data.prompts import DataConfig, LoadedPrompts, load_prompts
from streamrl.data.rendering import load_tokenizer, load_vocab_size
from streamrl.data.rows import TEXT_PROMPT, Row, load_rows
from streamrl.data.stream import PromptStream
from streamrl.data.texts import TextStream, load_texts

__all__ = [
    "TEXT_PROMPT",
    "DataConfig",
    "LoadedPrompts",
    "PromptStream",
    "Row",
    "TextStream",
    "load_prompts",
    "load_rows",
    "load_texts",
    "load_tokenizer",
    "load_vocab_size",
]
