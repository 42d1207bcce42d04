"""Prompt data: files of any size, rendered on demand, streamed in endless resumable epochs."""

from streamrl.data.chat_template import load_tokenizer, load_vocab_size
from streamrl.data.classify_rows import PromptLimits, RowStatus
from streamrl.data.config import DataConfig
from streamrl.data.files import DataFile
from streamrl.data.pretrain_texts import TextStream, load_texts
from streamrl.data.prompt_stream import PromptStream
from streamrl.data.prompts import LoadedFile, LoadedPrompts, load_prompt_files, load_prompts
from streamrl.data.reading.rows import DataRow, load_rows
from streamrl.data.training_files import TrainingFiles, open_training_files

__all__ = [
    "DataConfig",
    "DataFile",
    "DataRow",
    "LoadedFile",
    "LoadedPrompts",
    "PromptLimits",
    "PromptStream",
    "RowStatus",
    "TextStream",
    "TrainingFiles",
    "load_prompt_files",
    "load_prompts",
    "load_rows",
    "load_texts",
    "load_tokenizer",
    "load_vocab_size",
    "open_training_files",
]
