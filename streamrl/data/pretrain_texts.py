"""Texts for the pretraining loss (PPO-ptx, arXiv 2203.02155), streamed in endless epochs."""

from collections.abc import Sequence

import numpy as np

from streamrl.data.indexed_table import open_table
from streamrl.data.prompt_file import iterate_records
from streamrl.errors import ConfigError

TEXT_COLUMN = "text"


def load_texts(path: str) -> list[str]:
    """Load the column `text` of a data file in file order. Raises ConfigError with file and row."""
    texts = []
    for location, _, record in iterate_records(open_table(path)):
        if isinstance(record, ConfigError):
            raise record
        text = record.get(TEXT_COLUMN) if isinstance(record, dict) else None
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{location}: column {TEXT_COLUMN!r} must be non-empty text")
        texts.append(text)
    return texts


class TextStream:
    """Endless stream of pretraining texts, shuffled anew each epoch by the seed.

    A batch depends only on its number, so the stream needs no checkpoint.
    """

    def __init__(self, texts: Sequence[str], *, seed: int) -> None:
        self._texts = texts
        self._seed = seed

    def get_batch(self, number: int, size: int) -> list[str]:
        positions = range(number * size, (number + 1) * size)
        epochs = {position // len(self._texts) for position in positions}
        orders = {epoch: self._shuffle_epoch(epoch) for epoch in epochs}
        pairs = [divmod(position, len(self._texts)) for position in positions]
        return [self._texts[orders[epoch][index]] for epoch, index in pairs]

    def _shuffle_epoch(self, epoch: int) -> Sequence[int]:
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._texts))
        return [int(index) for index in order]
