"""A file of prompts: its rows are read, rendered and checked where they are asked for."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from streamrl.data.chat_template import load_tokenizer
from streamrl.data.classify_rows import BATCH, Examined, Examiner, Limits
from streamrl.data.files import MODEL, PLAIN, DataFile
from streamrl.data.reading.indexed_table import Table, open_table
from streamrl.data.reading.rows import parse_record
from streamrl.files.bounded_read import MOST_LINE_BYTES, open_regular
from streamrl.files.hf_config import is_trusted, trusted_env

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_rendering = threading.Lock()
"""Neither tokenizers nor a user's filter may be called by several threads at once."""


def _digest_of(path: str) -> str:
    """What a file that the settings name has in it, of its first MOST_LINE_BYTES."""
    with open_regular(path) as file:
        return hashlib.blake2b(file.read(MOST_LINE_BYTES), digest_size=8).hexdigest()


class LazyTokenizer:
    """The tokenizer of a model directory, loaded where it is first asked for, once a process."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._trusted = trusted_env(model) if is_trusted(model) else {}
        self._loaded: PreTrainedTokenizerBase | None = None

    def __call__(self) -> "PreTrainedTokenizerBase":
        """The tokenizer. Raises ConfigError naming the path if there is none."""
        if self._loaded is None:
            os.environ.update({} if is_trusted(self._model) else self._trusted)
            self._loaded = load_tokenizer(self._model)
        return self._loaded

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_loaded": None}


class PromptFile:
    """A file whose rows become prompts where they are asked for, in any order.

    `first` is the index in uids of its first row.
    """

    def __init__(
        self,
        file: DataFile,
        tokenizer: "Callable[[], PreTrainedTokenizerBase]",
        limits: Limits,
        *,
        first: int = 0,
        table: Table | None = None,
    ) -> None:
        self.file = file
        self.limits = limits
        self.table = open_table(file.path, file.split) if table is None else table
        self.indices = first + self.table.indices()
        self._first = first
        self._tokenizer = tokenizer
        self._examiner: Examiner | None = None

    def examine(self, indices: Sequence[int]) -> list[Examined]:
        """Make prompts of the rows of these indices. Raises DataError if they cannot be read."""
        return self.examine_rows(np.searchsorted(self.indices, indices).tolist())

    def examine_rows(self, rows: Sequence[int]) -> list[Examined]:
        """Make prompts of rows by their place among all."""
        keys = {"prompt_key": self.file.prompt_key, "label_key": self.file.label_key}
        read = self.table.records(rows)
        parsed = [parse_record(record, place, index, **keys) for place, index, record in read]
        with _rendering:
            if self._examiner is None:
                tokenizer = self._tokenizer()
                self._examiner = Examiner(self.file, tokenizer, self.limits, first=self._first)
            return list(self._examiner.examine(parsed))

    def __iter__(self) -> Iterator[Examined]:
        """Yield what becomes of every row, in their order."""
        for start in range(0, len(self.table), BATCH):
            yield from self.examine_rows(range(start, min(start + BATCH, len(self.table))))

    def with_limits(self, limits: Limits) -> "PromptFile":
        """The same file under other limits."""
        return PromptFile(self.file, self._tokenizer, limits, first=self._first, table=self.table)

    @property
    def settings(self) -> str:
        """What prompts follow from besides the rows: the settings, and the files that they name."""
        file, limits = self.file, self.limits
        facts: list[object] = [file.prompt_key, file.label_key, file.split, file.template]
        facts += [sorted(file.template_arguments.items()), limits.on_long]
        named = [] if file.template in (MODEL, PLAIN) else [file.template]
        named += [file.filter.rpartition(":")[0]] if file.filter else []
        code = [_digest_of(one) for one in named]
        return repr((facts, file.filter.rpartition(":")[2], code))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_examiner": None}
