"""Row order of the prompt stream: files interleaved by weight, each shuffled on its own.

The order is a pure function of the rows, the seed and the shuffle flag.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.data.classify_rows import ClassifiedRow

ClassifyIndices = Callable[[Sequence[int]], Sequence[ClassifiedRow]]
"""Classifies the rows with these uid indices."""


@dataclass(frozen=True)
class StreamFile:
    """Data file in the prompt stream, with its share of the stream.

    indices: uid indices of its rows, unique in the stream. fraction: share of the stream's prompts.
    classify_indices: turns rows into prompts. name: used in errors.
    """

    indices: NDArray[np.int64]
    fraction: float
    classify_indices: ClassifyIndices
    name: str = "data"


class FileOrder:
    """Endless order of the rows of one data file, epoch after epoch.

    indices: uid indices of the rows in file order. part: number of the file; seeds its shuffle.
    """

    def __init__(self, indices: NDArray[np.int64], *, part: int, seed: int, shuffle: bool) -> None:
        self._indices = indices
        self._file_number = part
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        return len(self._indices)

    def get_epoch_order(self, number: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return self._indices
        return self._indices[_make_permutation(len(self), [self._seed, number, self._file_number])]

    def iter_batches(self, start: int, size: int) -> Iterator[list[tuple[int, int]]]:
        """Yield batches of (epoch, uid index) within an epoch, after `start` rows since epoch 0."""
        epoch, position = divmod(start, len(self))
        while True:
            order = self.get_epoch_order(epoch)
            for first in range(position, len(self), size):
                yield [(epoch, index) for index in order[first : first + size].tolist()]
            epoch, position = epoch + 1, 0


def choose_next_file(shares: Sequence[float], num_prompts: Sequence[int]) -> int:
    """Return the number of the file that is furthest behind its share of the prompt stream.

    num_prompts: prompts drawn from each file so far. No file is ever a whole prompt ahead of its
    share, so runs of a file stay short. Example: shares (0.5, 0.25, 0.25) draw files 0 1 2 0, then
    repeat.
    """
    total = sum(num_prompts) + 1
    deficits = [share * total - n for share, n in zip(shares, num_prompts, strict=True)]
    return deficits.index(max(deficits))


def _make_permutation(size: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return a permutation of range(size) that is the same for a seed under every numpy version.

    numpy guarantees the raw stream of a bit generator, not `Generator.permutation`.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(raw, kind="stable")
