"""Prompt file with random access: rows are read, rendered and checked on demand."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from streamrl.data.chat_template import load_tokenizer
from streamrl.data.classify_rows import (
    RENDER_BATCH_ROWS,
    ClassifiedRow,
    PromptLimits,
    RowClassifier,
)
from streamrl.data.files import MODEL_TEMPLATE, PLAIN_TEMPLATE, DataFile
from streamrl.data.reading.indexed_table import IndexedTable, iterate_records, open_table
from streamrl.data.reading.reasoning_gym_table import ReasoningGymTable
from streamrl.data.reading.rows import DataRow, parse_record, parse_records
from streamrl.files.bounded_read import MAX_LINE_BYTES, open_regular_file
from streamrl.files.hf_config import is_trusted, make_trusted_env

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_render_lock = threading.Lock()
"""Serializes rendering: neither tokenizers nor user filters are thread-safe."""


def _hash_file(path: str) -> str:
    with open_regular_file(path) as file:
        return hashlib.blake2b(file.read(MAX_LINE_BYTES), digest_size=8).hexdigest()


RowTable = IndexedTable | ReasoningGymTable


def open_rows(file: DataFile) -> RowTable:
    """Open the rows of an entry. Raises ConfigError for data that cannot be used."""
    if file.tasks is not None:
        return ReasoningGymTable(file.tasks, path=file.path, key=file.key)
    return open_table(file.path, file.split)


def load_data_rows(file: DataFile) -> Iterator[DataRow]:
    """Yield the rows of an entry in order. Raises ConfigError at the first bad row."""
    records = iterate_records(open_rows(file))
    return parse_records(records, prompt_key=file.prompt_key, label_key=file.label_key)


class LazyTokenizer:
    """Tokenizer of a model directory, loaded on first use in each process."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._trusted_env = make_trusted_env(model) if is_trusted(model) else {}
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def __call__(self) -> "PreTrainedTokenizerBase":
        if self._tokenizer is None:
            os.environ.update({} if is_trusted(self._model) else self._trusted_env)
            self._tokenizer = load_tokenizer(self._model)
        return self._tokenizer

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_tokenizer": None}


class PromptFile:
    """Data file whose rows are turned into prompts on demand, in any order.

    first: uid index of the first row. table: rows of the file, opened from `file` by default.
    """

    def __init__(
        self,
        file: DataFile,
        tokenizer: "Callable[[], PreTrainedTokenizerBase]",
        limits: PromptLimits,
        *,
        first: int = 0,
        table: RowTable | None = None,
    ) -> None:
        self.file = file
        self.limits = limits
        self.table = open_rows(file) if table is None else table
        self.indices = first + self.table.get_indices()
        self._first_index = first
        self._tokenizer = tokenizer
        self._classifier: RowClassifier | None = None

    def classify_indices(self, indices: Sequence[int]) -> list[ClassifiedRow]:
        """Turn the rows with these uid indices into prompts. Raises DataError if unreadable."""
        return self.classify_rows(np.searchsorted(self.indices, indices).tolist())

    def classify_rows(self, rows: Sequence[int]) -> list[ClassifiedRow]:
        keys = {"prompt_key": self.file.prompt_key, "label_key": self.file.label_key}
        records = self.table.read_rows(rows)
        parsed = [
            parse_record(record, location, index, **keys) for location, index, record in records
        ]
        with _render_lock:
            if self._classifier is None:
                tokenizer = self._tokenizer()
                self._classifier = RowClassifier(
                    self.file, tokenizer, self.limits, first=self._first_index
                )
            return list(self._classifier.classify_rows(parsed))

    def __iter__(self) -> Iterator[ClassifiedRow]:
        for start in range(0, len(self.table), RENDER_BATCH_ROWS):
            yield from self.classify_rows(
                range(start, min(start + RENDER_BATCH_ROWS, len(self.table)))
            )

    def with_limits(self, limits: PromptLimits) -> "PromptFile":
        return PromptFile(
            self.file, self._tokenizer, limits, first=self._first_index, table=self.table
        )

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the rows themselves."""
        return self.table.list_notes() if isinstance(self.table, ReasoningGymTable) else []

    @property
    def settings_text(self) -> str:
        """Text of all settings that prompts depend on, with hashes of template and filter file."""
        file, limits = self.file, self.limits
        facts: list[object] = [file.prompt_key, file.label_key, file.split, file.template]
        facts += [sorted(file.template_arguments.items()), limits.on_long]
        paths = [] if file.template in (MODEL_TEMPLATE, PLAIN_TEMPLATE) else [file.template]
        paths += [file.filter.rpartition(":")[0]] if file.filter else []
        code = [_hash_file(path) for path in paths]
        return repr((facts, file.filter.rpartition(":")[2], code))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_classifier": None}
