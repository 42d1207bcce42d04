"""Endless stream of prompts that resumes at the exact row.

    rows of file 0, in order --> read, render, check, some batches ahead --+
                                                                           +--> interleave by share
    rows of file 1, in order --> read, render, check, some batches ahead --+

The order is a pure function of the rows, the seed and the shuffle flag. The position of the stream
is two counts per file: rows drawn, and prompts obtained from them. With `data.sampling=difficulty`
the stream also skips rows by their running pass rates, which are part of its state.
"""

import asyncio
import copy
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.data.pass_rates import PassRates
from streamrl.data.prompt_file import (
    COLUMNS_MARK,
    ClassifiedRow,
    RowStatus,
    TrainingFile,
    TrainingFiles,
)
from streamrl.data.replays import ReplayStore
from streamrl.errors import ConfigError, DataError
from streamrl.messages import Prompt, make_uid, parse_uid

MAX_REPORTED_ROWS = 10
"""Bad rows between two calls of `take_skipped` that are described; further rows are counted."""
FETCH_BATCH_ROWS, PREFETCH_BATCHES = 64, 4
"""Rows per rendered batch, and batches that each file's thread keeps ready."""
MAX_BAD_SHARE = 0.1
"""Largest share of unusable rows of a file; a larger share ends the run."""
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


class PromptStream(Iterator[Prompt]):
    """Endless iterator over the prompts of all files: every row once per epoch of its file.

    Each file has its own epochs, shuffled by (seed, file, epoch). A prompt has uid (epoch, index,
    0). Rows without a prompt are skipped and reported by `take_skipped`; if a file's share of
    unusable rows exceeds MAX_BAD_SHARE, drawing raises DataError. A thread per file prefetches
    rows. curriculum: column of numbers by which each epoch is sorted, ties in the shuffled order;
    ConfigError for a row without one. pass_rates: rates by which an epoch skips rows that are too
    easy or too hard. replays: store of groups to admit again, which is saved with the stream.
    """

    def __init__(
        self,
        data: TrainingFiles,
        *,
        seed: int,
        shuffle: bool = True,
        curriculum: str = "",
        pass_rates: PassRates | None = None,
        replays: ReplayStore | None = None,
    ) -> None:
        self.pass_rates = pass_rates
        self.replays = replays
        self._data = data
        self._seed = seed
        self._shuffle = shuffle
        self._levels = [
            file.prompt_file.read_numbers(curriculum, file.row_indices) if curriculum else None
            for file in data.files
        ]
        self._skipped = SkippedRows()
        zeros = (0,) * len(data.files)
        self._set_position(StreamPosition(zeros, zeros))

    def _set_position(self, position: StreamPosition) -> None:
        self._position = position
        self._prefetched: deque[DrawnPrompt] = deque()
        self._source: Iterator[DrawnPrompt] | None = None

    def __len__(self) -> int:
        return sum(len(file.row_indices) for file in self._data.files)

    def __next__(self) -> Prompt:
        """Return the next prompt. Raises DataError if rows cannot be read, or too many are bad."""
        if not self._prefetched:
            self._fill_buffer(1)
        drawn = self._prefetched.popleft()
        self._position = drawn.position
        self._skipped.add(drawn.skipped)
        return drawn.prompt

    def draw_prompts(self, count: int) -> list[Prompt]:
        return [next(self) for _ in range(count)]

    async def prefetch_prompts(self, count: int) -> None:
        """Buffer the next `count` prompts in a thread, so that drawing does not block the loop.

        Callers must not draw prompts until this coroutine has returned.
        """
        if len(self._prefetched) < count:
            await asyncio.to_thread(self._fill_buffer, count)

    def _fill_buffer(self, count: int) -> None:
        while len(self._prefetched) < count:
            if self._source is None:
                last = self._prefetched[-1].position if self._prefetched else self._position
                self._source = self._iter_prompts(last)
            try:
                self._prefetched.append(next(self._source))
            except BaseException:
                self._source = None  # an error ends a generator
                raise

    def _iter_prompts(self, start: StreamPosition) -> Iterator[DrawnPrompt]:
        """Yield the prompts of all files, interleaved by their shares, from a position on.

        Raises DataError if a file yields none, or too many bad rows.
        """
        files, shares = self._data.files, self._data.shares
        num_drawn, num_prompts = list(start.num_drawn), list(start.num_prompts)
        bad_rows = [BadRowLimit(file) for file in files]
        sources = [
            iter_classified_rows(
                file,
                iter_row_batches(
                    file.row_indices,
                    first,
                    part=i,
                    seed=self._seed,
                    shuffle=self._shuffle,
                    levels=self._levels[i],
                ),
            )
            for i, (file, first) in enumerate(zip(files, start.num_drawn, strict=True))
        ]
        while True:
            i, skipped = choose_next_file(shares, num_prompts), []
            for epoch, row in sources[i]:
                num_drawn[i] += 1
                if row.status is not RowStatus.KEPT:
                    skipped.append(row)
                bad_rows[i].check_row(row)
                if row.prompt is not None and self._is_chosen(epoch, row.prompt):
                    num_prompts[i] += 1
                    uid = make_uid(epoch, parse_uid(row.prompt.uid)[1])
                    position = StreamPosition(tuple(num_drawn), tuple(num_prompts))
                    yield DrawnPrompt(replace(row.prompt, uid=uid), position, tuple(skipped))
                    break

    def _is_chosen(self, epoch: int, prompt: Prompt) -> bool:
        row = parse_uid(prompt.uid)[1]
        return self.pass_rates is None or self.pass_rates.is_chosen(
            seed=self._seed, epoch=epoch, row=row
        )

    def take_skipped(self) -> "SkippedRows":
        """Return counts of the rows skipped since the last call, and reset them."""
        skipped, self._skipped = self._skipped, SkippedRows()
        return skipped

    def get_prompt(self, uid: str) -> Prompt:
        """Return the prompt of a uid, of any attempt, without advancing the stream.

        Raises ValueError for an index outside the data, and DataError if the row no longer yields a
        prompt.
        """
        _, index, _ = parse_uid(uid)
        for file in self._data.files:
            position = int(file.row_indices.searchsorted(index))
            if position < len(file.row_indices) and file.row_indices[position] == index:
                (row,) = file.prompt_file.make_prompts([index])
                if row.prompt is None:
                    raise DataError(f"uid {uid}: {row.problem or row.status.value}")
                return replace(row.prompt, uid=uid)
        raise ValueError(f"uid {uid}: no prompt with index {index} among the {len(self)}")

    @property
    def _stream_identity(self) -> dict[str, Any]:
        """Facts about data and order that must not change when the stream resumes."""
        return {
            "num_prompts": len(self),
            "fingerprint": self._data.fingerprint,
            "files": [
                [len(file.row_indices), share]
                for file, share in zip(self._data.files, self._data.shares, strict=True)
            ],
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def state_dict(self) -> dict[str, Any]:
        drawn, given = self._position.num_drawn, self._position.num_prompts
        rates = {} if self.pass_rates is None else {"pass_rates": self.pass_rates.state_dict()}
        replays = {} if self.replays is None else {"replays": self.replays.state_dict()}
        position = {"drawn": list(drawn), "given": list(given)}
        return {**position, **self._stream_identity, **rates, **replays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the stream that wrote `state` stopped.

        Raises ConfigError if that stream had other prompts or another order, which would lose some
        rows of the epoch and repeat others.
        """
        for name, now in self._stream_identity.items():
            if name == "fingerprint" and COLUMNS_MARK not in state[name]:
                now = now.partition(COLUMNS_MARK)[0]  # earlier versions hashed the prompts only
            if state[name] != now:
                raise ConfigError(
                    f"cannot resume the data stream: {_IDENTITY_TEXTS[name]} was"
                    f" {state[name]} in the "
                    f"checkpoint and is {now} now; restore it, or start a new run"
                )
        if self.pass_rates is not None:
            self.pass_rates.load_state_dict(state["pass_rates"])
        if self.replays is not None:
            # A fork may begin to replay.
            self.replays.load_state_dict(state.get("replays", []))
        self._set_position(StreamPosition(tuple(state["drawn"]), tuple(state["given"])))

    def __getstate__(self) -> dict[str, Any]:
        # A copy draws without the original's results.
        learned = {name: copy.deepcopy(vars(self)[name]) for name in ("pass_rates", "replays")}
        return {**vars(self), "_source": None, "_prefetched": deque(), **learned}


_IDENTITY_TEXTS = {
    "num_prompts": "the number of prompts in data.train",
    "fingerprint": "the content of data.train, prompts and other columns (fingerprint),",
    "files": "the row count and stream share of each file in data.train",
    "shuffle": "data.shuffle",
    "seed": "the seed of the data order",
}
"""Facts that must not change on resume, as users know them."""


class SkippedRows:
    """Counts of data rows that the prompt stream skipped, by status.

    problems: messages of the first bad rows, with locations.
    """

    def __init__(self) -> None:
        self._counts: Counter[RowStatus] = Counter()
        self.problems: list[str] = []

    def add(self, rows: Sequence[ClassifiedRow]) -> None:
        self._counts.update(row.status for row in rows)
        messages = [str(row.problem) for row in rows if row.problem is not None]
        self.problems += messages[: MAX_REPORTED_ROWS - len(self.problems)]

    @property
    def metrics(self) -> dict[str, int]:
        """Number of rows per status as metrics data/<status>, zeros included, kept rows not."""
        return {
            f"data/{status.value.replace(' ', '_')}": self._counts[status]
            for status in RowStatus
            if status is not RowStatus.KEPT
        }


def iter_row_batches(
    indices: NDArray[np.int64],
    start: int,
    *,
    part: int,
    seed: int,
    shuffle: bool,
    levels: NDArray[np.float64] | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (epoch, uid index) of a file's rows, after `start` rows since epoch 0.

    part: number of the file; seeds its shuffle. A batch is within an epoch. levels: numbers by
    which an epoch is sorted, in the order of `indices`.
    """
    epoch, position = divmod(start, len(indices))
    while True:
        order = np.arange(len(indices))
        if shuffle:
            # numpy guarantees the raw stream of a bit generator, not `Generator.permutation`.
            random = np.random.PCG64(np.random.SeedSequence([seed, epoch, part]))
            order = np.argsort(random.random_raw(len(indices)), kind="stable")
        if levels is not None:
            order = order[np.argsort(levels[order], kind="stable")]
        for first in range(position, len(indices), FETCH_BATCH_ROWS):
            end = first + FETCH_BATCH_ROWS
            yield [(epoch, index) for index in indices[order[first:end]].tolist()]
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


def iter_classified_rows(
    file: TrainingFile, batches: Iterator[list[tuple[int, int]]]
) -> Iterator[tuple[int, ClassifiedRow]]:
    """Yield the epoch and prompt of each row; a thread keeps batches ready."""

    def make_batch(batch: list[tuple[int, int]]) -> list[tuple[int, ClassifiedRow]]:
        rows = file.prompt_file.make_prompts([index for _, index in batch])
        return [(epoch, row) for (epoch, _), row in zip(batch, rows, strict=True)]

    thread = ThreadPoolExecutor(1, "prompts")
    ahead: deque[Future[list[tuple[int, ClassifiedRow]]]] = deque(
        thread.submit(make_batch, batch) for batch in islice(batches, PREFETCH_BATCHES)
    )
    while ahead:
        yield from ahead.popleft().result()
        ahead.append(thread.submit(make_batch, next(batches)))


class BadRowLimit:
    """Limit of the bad rows of a file, and of its rows between two prompts."""

    def __init__(self, file: TrainingFile) -> None:
        self._file = file
        self._num_seen = self._num_bad = self._num_since_prompt = 0

    def check_row(self, row: ClassifiedRow) -> None:
        """Count a row. Raises DataError if the file yields no prompt, or too many bad rows."""
        self._num_seen += 1
        self._num_bad += row.status is RowStatus.BAD
        self._num_since_prompt = 0 if row.prompt is not None else self._num_since_prompt + 1
        # Allow two epochs: a file's single good row may come first in one and last in the next.
        num_rows, path = len(self._file.row_indices), self._file.prompt_file.file.path
        if self._num_since_prompt >= 2 * num_rows:
            raise DataError(f"{path}: none of its {num_rows} rows yields a prompt")
        if self._num_bad > MAX_BAD_SHARE * max(self._num_seen, MIN_ROWS_FOR_BAD_SHARE):
            raise DataError(
                f"{path}: {self._num_bad} of the last {self._num_seen} rows are"
                f" unusable, more than {MAX_BAD_SHARE:.0%}; last problem:"
                f" {row.problem}"
            )
