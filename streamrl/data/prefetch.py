"""Prefetching of prompts with torchdata nodes, one thread per file.

    row order of file 0 --> read, render, check --> prefetch --+
                                                               +--> interleave by share --> prompts
    row order of file 1 --> read, render, check --> prefetch --+

Unusable rows are skipped, and reported together with the next prompt.
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
"""Rows per rendered batch, and batches that each file's thread keeps ready."""
MIN_ROWS_FOR_BAD_SHARE = 1000
"""Rows after which the share of bad rows is checked; smaller samples are too noisy."""


@dataclass(frozen=True)
class StreamPosition:
    """Position in the prompt stream: per file, rows drawn and prompts obtained from these rows."""

    num_drawn: tuple[int, ...]
    num_prompts: tuple[int, ...]


@dataclass(frozen=True)
class DrawnPrompt:
    """Prompt of the stream, position of the stream after it, and rows skipped before it."""

    prompt: Prompt
    position: StreamPosition
    skipped: tuple[ClassifiedRow, ...]


class InterleaveNode(BaseNode[DrawnPrompt]):
    """torchdata node: endless stream of the prompts of all files, interleaved by their shares."""

    def __init__(
        self,
        stream_files: Sequence[StreamFile],
        *,
        seed: int,
        shuffle: bool,
        max_bad_share: float = 1.0,
        prefetch_batches: int = PREFETCH_BATCHES,
    ) -> None:
        super().__init__()
        self._prefetch_batches = prefetch_batches
        self._stream_files = stream_files
        self._orders = [
            FileOrder(file.indices, part=i, seed=seed, shuffle=shuffle)
            for i, file in enumerate(stream_files)
        ]
        self._max_bad_share = max_bad_share

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        zeros = [0] * len(self._stream_files)
        state = initial_state or {"drawn": zeros, "given": zeros}
        self._num_drawn, self._num_prompts = list(state["drawn"]), list(state["given"])
        self._num_seen, self._num_bad = zeros.copy(), zeros.copy()
        self._num_since_prompt = zeros.copy()
        self._sources = [
            _make_file_node(order, start, file.classify_indices, self._prefetch_batches)
            for order, start, file in zip(
                self._orders, self._num_drawn, self._stream_files, strict=True
            )
        ]

    def next(self) -> DrawnPrompt:
        """Return the next prompt. Raises DataError if a file yields none, or too many bad rows."""
        i = choose_next_file([file.fraction for file in self._stream_files], self._num_prompts)
        skipped = []
        while True:
            epoch, row = next(self._sources[i])
            if isinstance(row, DataError):
                raise row
            self._num_drawn[i] += 1
            self._num_seen[i] += 1
            if row.status is not RowStatus.KEPT:
                skipped.append(row)
            if row.prompt is not None:
                break
            self._num_bad[i] += row.status is RowStatus.BAD
            self._num_since_prompt[i] += 1
            self._check_bad_rows(i, row)
        self._num_prompts[i] += 1
        self._num_since_prompt[i] = 0
        prompt = replace(row.prompt, uid=make_uid(epoch, parse_uid(row.prompt.uid)[1]))
        position = StreamPosition(tuple(self._num_drawn), tuple(self._num_prompts))
        return DrawnPrompt(prompt, position, tuple(skipped))

    def get_state(self) -> dict[str, Any]:
        return {"drawn": list(self._num_drawn), "given": list(self._num_prompts)}

    def _check_bad_rows(self, i: int, last: ClassifiedRow) -> None:
        name, seen, bad = self._stream_files[i].name, self._num_seen[i], self._num_bad[i]
        # Allow two epochs: a file's single good row may come first in one and last in the next.
        rows = len(self._orders[i])
        if self._num_since_prompt[i] >= 2 * rows:
            raise DataError(f"{name}: none of its {rows} rows yields a prompt")
        if bad > self._max_bad_share * max(seen, MIN_ROWS_FOR_BAD_SHARE):
            raise DataError(
                f"{name}: {bad} of the last {seen} rows are unusable, more than"
                f" data.max_bad_share={self._max_bad_share:g}; last problem: {last.problem}"
            )


SourceItem = tuple[int, ClassifiedRow | DataError]


def _make_file_node(
    order: FileOrder, start: int, classify: ClassifyIndices, prefetch_batches: int
) -> BaseNode[SourceItem]:
    """Build the node that reads a file's rows, after `start` rows, and turns them into prompts.

    prefetch_batches: batches that a thread keeps ready; 0 reads without a thread.
    """

    def classify_batch(batch: Sequence[tuple[int, int]]) -> list[SourceItem]:
        try:
            rows: Sequence[ClassifiedRow | DataError] = classify([index for _, index in batch])
        # Pass the error as a value: torchdata re-raises exceptions of its threads as another type
        # with a multi-line message.
        except DataError as error:
            rows = [error] * len(batch)
        return [(epoch, row) for (epoch, _), row in zip(batch, rows, strict=True)]

    node: BaseNode[list[SourceItem]] = Mapper(
        IterableWrapper(order.iter_batches(start, FETCH_BATCH_ROWS)), classify_batch
    )
    if prefetch_batches:
        node = Prefetcher(node, prefetch_factor=prefetch_batches)
    return Unbatcher(node)
