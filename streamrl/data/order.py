"""Which prompt comes next: the files of a stream interleaved by weight, each shuffled by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.messages import make_uid


@dataclass(frozen=True)
class Part:
    """The prompts of one file: their indices in the file's order, and its share of the stream."""

    indices: Sequence[int]
    share: float


class UidSampler:
    """The endless order of a stream: every iterator begins at the start.

    The order is a pure function of the parts, the seed and whether to shuffle.
    """

    def __init__(self, parts: Sequence[Part], *, seed: int, shuffle: bool) -> None:
        self._parts = parts
        self._seed = seed
        self._shuffle = shuffle

    def __iter__(self) -> "UidIterator":
        return UidIterator(self)

    def next_part(self, drawn: Sequence[int]) -> int:
        """The part that is furthest behind its share once `drawn` prompts of each are out.

        No part is ever a whole prompt ahead of its share, so that no file comes in long runs.
        """
        total = sum(drawn) + 1
        behind = [part.share * total - n for part, n in zip(self._parts, drawn, strict=True)]
        return behind.index(max(behind))

    def order(self, part: int, epoch: int) -> list[int]:
        """The indices of a part in the order of one of its epochs."""
        indices = list(self._parts[part].indices)
        if not self._shuffle:
            return indices
        return [indices[i] for i in _permutation(len(indices), [self._seed, epoch, part])]

    @property
    def sizes(self) -> list[int]:
        """Prompts of each part."""
        return [len(part.indices) for part in self._parts]


class UidIterator(Iterator[str]):
    """Uids without end. Its state is how many prompts of each part it has given out."""

    def __init__(self, sampler: UidSampler) -> None:
        self._sampler = sampler
        self._sizes = sampler.sizes
        self._drawn = [0] * len(self._sizes)
        self._orders: list[tuple[int, list[int]]] = [(-1, [])] * len(self._sizes)

    def __next__(self) -> str:
        part = self._sampler.next_part(self._drawn)
        epoch, position = divmod(self._drawn[part], self._sizes[part])
        if self._orders[part][0] != epoch:
            self._orders[part] = (epoch, self._sampler.order(part, epoch))
        self._drawn[part] += 1
        return make_uid(epoch, self._orders[part][1][position])

    def state_dict(self) -> dict[str, Any]:
        """How many prompts of each part are out, as JSON."""
        return {"drawn": list(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the iterator that wrote `state` stood."""
        drawn = state["drawn"]
        if len(drawn) != len(self._sizes) or min(drawn) < 0:
            raise ValueError(f"{drawn} prompts drawn of {len(self._sizes)} files")
        self._drawn = list(drawn)


def _permutation(size: int, seed: Sequence[int]) -> list[int]:
    """A permutation of range(size) by the seed, the same under every version of numpy.

    numpy keeps the raw numbers of a bit generator stable between versions, but not what
    `Generator.permutation` makes of them; sorting the raw numbers is stable too.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)
    order: list[int] = np.argsort(raw, kind="stable").tolist()
    return order
