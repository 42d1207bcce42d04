"""Which row comes next: the files of a stream interleaved by weight, each shuffled by itself.

The order is a pure function of the rows, the seed and whether to shuffle.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.data.classify_rows import ClassifiedRow

ClassifyIndices = Callable[[Sequence[int]], Sequence[ClassifiedRow]]
"""Makes prompts of the rows of some indices."""


@dataclass(frozen=True)
class StreamFile:
    """The rows of one file in a stream: their indices in uids, and the file's share of the stream.

    `examine` makes prompts of the rows of some indices. `name` is what errors call the file.
    """

    indices: NDArray[np.int64]
    fraction: float
    classify_indices: ClassifyIndices
    name: str = "data"


class FileOrder:
    """The endless order of one file's rows, epoch after epoch.

    indices: those of its rows in uids, in the file's order. part: the file's place among all.
    """

    def __init__(self, indices: NDArray[np.int64], *, part: int, seed: int, shuffle: bool) -> None:
        self._indices = indices
        self._file_number = part
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._indices)

    def get_epoch_order(self, number: int) -> NDArray[np.int64]:
        """Return the indices in the order of one epoch."""
        if not self._shuffle:
            return self._indices
        return self._indices[_make_permutation(len(self), [self._seed, number, self._file_number])]

    def iter_batches(self, start: int, size: int) -> Iterator[list[tuple[int, int]]]:
        """Yield (epoch, index) from place `start` of the order on, up to `size` at once."""
        number, at = divmod(start, len(self))
        while True:
            order = self.get_epoch_order(number)
            for first in range(at, len(self), size):
                yield [(number, index) for index in order[first : first + size].tolist()]
            number, at = number + 1, 0


def choose_next_file(shares: Sequence[float], given: Sequence[int]) -> int:
    """Return the file that is furthest behind its share once `given` prompts of each are out.

    No file is ever a whole prompt ahead of its share, so that none comes in long runs.
    """
    total = sum(given) + 1
    behind = [share * total - n for share, n in zip(shares, given, strict=True)]
    return behind.index(max(behind))


def _make_permutation(size: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """A permutation of range(size) by the seed, the same under every version of numpy.

    numpy keeps the raw numbers of a bit generator stable between versions, but not what
    `Generator.permutation` makes of them; sorting the raw numbers is stable too.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(raw, kind="stable")
