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

from streamrl.data.classify_rows import ClassifiedRow, RowStatus
from streamrl.data.interleave import ClassifyIndices, FileOrder, StreamFile, choose_next_file
from streamrl.errors import DataError
from streamrl.messages import Prompt, make_uid, parse_uid

FETCH_BATCH_ROWS, PREFETCH_BATCHES = 64, 4
"""Rows of a file that are rendered together, and batches that a thread has ready."""
MIN_ROWS_FOR_BAD_SHARE = 1000
"""Rows of which it cannot yet be said that too many are bad."""


@dataclass(frozen=True)
class StreamPosition:
    """How many rows of each file were drawn, and how many of them gave a prompt."""

    num_drawn: tuple[int, ...]
    num_prompts: tuple[int, ...]


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt, where the stream stands behind it, and the rows before it that gave none."""

    prompt: Prompt
    position: StreamPosition
    skipped: tuple[ClassifiedRow, ...]


class InterleaveNode(BaseNode[DrawnPrompt]):
    """The prompts of all files, interleaved by their shares. Never ends."""

    def __init__(
        self,
        parts: Sequence[StreamFile],
        *,
        seed: int,
        shuffle: bool,
        max_bad_share: float = 1.0,
        ahead: int = PREFETCH_BATCHES,
    ) -> None:
        super().__init__()
        self._prefetch_batches = ahead
        self._stream_files = parts
        self._orders = [
            FileOrder(part.indices, part=i, seed=seed, shuffle=shuffle)
            for i, part in enumerate(parts)
        ]
        self._max_bad_share = max_bad_share

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin at the start, or where the state says."""
        super().reset(initial_state)
        zeros = [0] * len(self._stream_files)
        state = initial_state or {"drawn": zeros, "given": zeros}
        self._num_drawn, self._num_prompts = list(state["drawn"]), list(state["given"])
        self._num_seen, self._num_bad, self._num_since_prompt = (
            zeros.copy(),
            zeros.copy(),
            zeros.copy(),
        )
        self._sources = [
            _make_file_node(order, start, part.classify_indices, self._prefetch_batches)
            for order, start, part in zip(
                self._orders, self._num_drawn, self._stream_files, strict=True
            )
        ]

    def next(self) -> DrawnPrompt:
        """Return the next prompt. Raises DataError if its file gives none any more."""
        place = choose_next_file([part.fraction for part in self._stream_files], self._num_prompts)
        skipped = []
        while True:
            epoch, found = next(self._sources[place])
            if isinstance(found, DataError):
                raise found
            self._num_drawn[place] += 1
            self._num_seen[place] += 1
            if found.status is not RowStatus.KEPT:
                skipped.append(found)
            if found.prompt is not None:
                break
            self._num_bad[place] += found.status is RowStatus.BAD
            self._num_since_prompt[place] += 1
            self._check_bad_rows(place, found)
        self._num_prompts[place] += 1
        self._num_since_prompt[place] = 0
        prompt = replace(found.prompt, uid=make_uid(epoch, parse_uid(found.prompt.uid)[1]))
        position = StreamPosition(tuple(self._num_drawn), tuple(self._num_prompts))
        return DrawnPrompt(prompt, position, tuple(skipped))

    def get_state(self) -> dict[str, Any]:
        """Return how many rows of each file were drawn and gave a prompt."""
        return {"drawn": list(self._num_drawn), "given": list(self._num_prompts)}

    def _check_bad_rows(self, place: int, last: ClassifiedRow) -> None:
        """Raise DataError if a file gives nothing, or next to nothing but bad rows."""
        name, seen, bad = (
            self._stream_files[place].name,
            self._num_seen[place],
            self._num_bad[place],
        )
        # The one good row of a file may be the first of an epoch, and the last of the next one.
        rows = len(self._orders[place])
        if self._num_since_prompt[place] >= 2 * rows:
            raise DataError(f"{name}: none of its {rows} rows gives a prompt")
        if bad > self._max_bad_share * max(seen, MIN_ROWS_FOR_BAD_SHARE):
            raise DataError(
                f"{name}: {bad} of the last {seen} rows cannot be used, more than"
                f" data.max_bad_share={self._max_bad_share:g}; the last: {last.problem}"
            )


SourceItem = tuple[int, ClassifiedRow | DataError]


def _make_file_node(
    order: FileOrder, start: int, examine: ClassifyIndices, ahead: int
) -> BaseNode[SourceItem]:
    """The rows of one file from a place of its order on, `ahead` batches before they are needed."""

    def made(batch: Sequence[tuple[int, int]]) -> list[SourceItem]:
        try:
            found: Sequence[ClassifiedRow | DataError] = examine([index for _, index in batch])
        # As a value: torchdata would raise it again as another, of many lines.
        except DataError as error:
            found = [error] * len(batch)
        return [(epoch, one) for (epoch, _), one in zip(batch, found, strict=True)]

    found: BaseNode[list[SourceItem]] = Mapper(
        IterableWrapper(order.iter_batches(start, FETCH_BATCH_ROWS)), made
    )
    return Unbatcher(Prefetcher(found, prefetch_factor=ahead) if ahead else found)
