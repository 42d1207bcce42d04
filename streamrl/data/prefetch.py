"""Prompts drawn from files as a graph of torchdata's nodes, ahead of need.

    places of a file --> rows read, rendered, checked --> prefetched --+
                                                                       +--> by shares --> prompts
    places of a file --> rows read, rendered, checked --> prefetched --+

A row that cannot be used is left out where it is met, and told with the prompt that comes after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from torchdata.nodes import BaseNode, IterableWrapper, Mapper, Prefetcher, Unbatcher

from streamrl.data.classify_rows import Examined, Fate
from streamrl.data.interleave import Examine, FileOrder, Part, next_part
from streamrl.errors import DataError
from streamrl.messages import Prompt, make_uid, parse_uid

BATCH, AHEAD = 64, 4
"""Rows of a file that are rendered together, and batches that a thread has ready."""
FEW = 1000
"""Rows of which it cannot yet be said that too many are bad."""


@dataclass(frozen=True)
class Position:
    """How many rows of each file were drawn, and how many of them gave a prompt."""

    drawn: tuple[int, ...]
    given: tuple[int, ...]


@dataclass(frozen=True)
class Drawn:
    """A prompt, where the stream stands behind it, and the rows before it that gave none."""

    prompt: Prompt
    position: Position
    skipped: tuple[Examined, ...]


class SharesNode(BaseNode[Drawn]):
    """The prompts of all files, interleaved by their shares. Never ends."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        seed: int,
        shuffle: bool,
        max_bad_share: float = 1.0,
        ahead: int = AHEAD,
    ) -> None:
        super().__init__()
        self._ahead = ahead
        self._parts = parts
        self._orders = [
            FileOrder(part.indices, part=i, seed=seed, shuffle=shuffle)
            for i, part in enumerate(parts)
        ]
        self._max_bad_share = max_bad_share

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin at the start, or where the state says."""
        super().reset(initial_state)
        zeros = [0] * len(self._parts)
        state = initial_state or {"drawn": zeros, "given": zeros}
        self._drawn, self._given = list(state["drawn"]), list(state["given"])
        self._seen, self._bad, self._in_vain = zeros.copy(), zeros.copy(), zeros.copy()
        self._sources = [
            _source(order, start, part.examine, self._ahead)
            for order, start, part in zip(self._orders, self._drawn, self._parts, strict=True)
        ]

    def next(self) -> Drawn:
        """Return the next prompt. Raises DataError if its file gives none any more."""
        place = next_part([part.share for part in self._parts], self._given)
        skipped = []
        while True:
            epoch, found = next(self._sources[place])
            if isinstance(found, DataError):
                raise found
            self._drawn[place] += 1
            self._seen[place] += 1
            if found.fate is not Fate.KEPT:
                skipped.append(found)
            if found.prompt is not None:
                break
            self._bad[place] += found.fate is Fate.BAD
            self._in_vain[place] += 1
            self._check(place, found)
        self._given[place] += 1
        self._in_vain[place] = 0
        prompt = replace(found.prompt, uid=make_uid(epoch, parse_uid(found.prompt.uid)[1]))
        position = Position(tuple(self._drawn), tuple(self._given))
        return Drawn(prompt, position, tuple(skipped))

    def get_state(self) -> dict[str, Any]:
        """Return how many rows of each file were drawn and gave a prompt."""
        return {"drawn": list(self._drawn), "given": list(self._given)}

    def _check(self, place: int, last: Examined) -> None:
        """Raise DataError if a file gives nothing, or next to nothing but bad rows."""
        name, seen, bad = self._parts[place].name, self._seen[place], self._bad[place]
        # The one good row of a file may be the first of an epoch, and the last of the next one.
        rows = len(self._orders[place])
        if self._in_vain[place] >= 2 * rows:
            raise DataError(f"{name}: none of its {rows} rows gives a prompt")
        if bad > self._max_bad_share * max(seen, FEW):
            raise DataError(
                f"{name}: {bad} of the last {seen} rows cannot be used, more than"
                f" data.max_bad_share={self._max_bad_share:g}; the last: {last.problem}"
            )


Found = tuple[int, Examined | DataError]


def _source(order: FileOrder, start: int, examine: Examine, ahead: int) -> BaseNode[Found]:
    """The rows of one file from a place of its order on, `ahead` batches before they are needed."""

    def made(batch: Sequence[tuple[int, int]]) -> list[Found]:
        try:
            found: Sequence[Examined | DataError] = examine([index for _, index in batch])
        # As a value: torchdata would raise it again as another, of many lines.
        except DataError as error:
            found = [error] * len(batch)
        return [(epoch, one) for (epoch, _), one in zip(batch, found, strict=True)]

    found: BaseNode[list[Found]] = Mapper(IterableWrapper(order.batches(start, BATCH)), made)
    return Unbatcher(Prefetcher(found, prefetch_factor=ahead) if ahead else found)
