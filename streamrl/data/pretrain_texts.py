"""Plain texts, as a model is pretrained on: read from a file, then streamed epoch after epoch."""

from collections.abc import Sequence

import numpy as np

from streamrl.data.reading.indexed_table import read_records
from streamrl.errors import ConfigError

TEXT_COLUMN = "text"


def load_texts(path: str) -> list[str]:
    """Column `text` of a data file, in file order.

    Raises ConfigError naming file, row and rule if the file or a row of it cannot be used.
    """
    texts = []
    for place, _, record in read_records(path):
        if isinstance(record, ConfigError):
            raise record
        text = record.get(TEXT_COLUMN) if isinstance(record, dict) else None
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{place}: column {TEXT_COLUMN!r} must be text, and not empty")
        texts.append(text)
    return texts


class TextStream:
    """Texts without end, each epoch in another order that follows from the seed.

    Which texts a batch has follows from its number alone: there is no state to be saved.
    """

    def __init__(self, texts: Sequence[str], *, seed: int) -> None:
        self._texts = texts
        self._seed = seed

    def get_batch(self, number: int, size: int) -> list[str]:
        """The texts of batch `number`, counted from 0."""
        places = range(number * size, (number + 1) * size)
        epochs = {place // len(self._texts) for place in places}
        orders = {epoch: self._shuffle_epoch(epoch) for epoch in epochs}
        found = [divmod(place, len(self._texts)) for place in places]
        return [self._texts[orders[epoch][index]] for epoch, index in found]

    def _shuffle_epoch(self, epoch: int) -> Sequence[int]:
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._texts))
        return [int(index) for index in order]
