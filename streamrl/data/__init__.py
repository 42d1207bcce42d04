"""Prompts: read from files of any size, rendered as they are drawn, streamed epoch after epoch."""

from streamrl.data.config import DataConfig
from streamrl.data.examining import Fate, Limits
from streamrl.data.files import DataFile
from streamrl.data.opened import OpenedFiles, open_files
from streamrl.data.prompts import LoadedFile, LoadedPrompts, load_files, load_prompts
from streamrl.data.rendering import load_tokenizer, load_vocab_size
from streamrl.data.rows import Row, load_rows
from streamrl.data.stream import PromptStream
from streamrl.data.texts import TextStream, load_texts

__all__ = [
    "DataConfig",
    "DataFile",
    "Fate",
    "Limits",
    "LoadedFile",
    "LoadedPrompts",
    "OpenedFiles",
    "PromptStream",
    "Row",
    "TextStream",
    "load_files",
    "load_prompts",
    "load_rows",
    "load_texts",
    "load_tokenizer",
    "load_vocab_size",
    "open_files",
]
