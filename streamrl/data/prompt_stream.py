"""The endless stream of prompts, resumable to the row.

Rows are read, rendered and checked shortly before they are needed: all that is to be known of a
place in the stream is how many rows of each file have been drawn, and how many gave a prompt.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from streamrl.data.classify_rows import ClassifiedRow, RowStatus
from streamrl.errors import ConfigError, DataError
from streamrl.messages import Prompt, make_uid, parse_uid

if TYPE_CHECKING:
    from streamrl.data.interleave import StreamFile
    from streamrl.data.prefetch import DrawnPrompt, InterleaveNode

MAX_REPORTED_ROWS = 10
"""Bad rows between two calls of `take_skipped` of which each is told; the others are counted."""


class StreamData(Protocol):
    """What a stream is of: its files, and what says that they are the same after a resume."""

    @property
    def stream_files(self) -> "Sequence[StreamFile]":
        """The files."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of what a run learns from."""
        ...

    @property
    def is_fully_classified(self) -> bool:
        """Whether every row has been examined: the parts have those alone that give prompts."""
        ...

    def classify_all_rows(self) -> "StreamData":
        """Examine every row. Raises ConfigError for one that cannot be used."""
        ...


class PromptStream(Iterator[Prompt]):
    """Every row of a file once per epoch of that file, for ever.

    Each file has epochs of its own, shuffled by (seed, file, epoch). A prompt goes out with uid
    (epoch, index, 0). A row that gives no prompt is passed over, and `take_skipped` tells of it;
    where more than `max_bad_share` of a file's rows cannot be used, drawing raises DataError. Rows
    are read in a thread for each file, unless `reads_ahead` is false.
    """

    def __init__(
        self,
        data: StreamData,
        *,
        seed: int,
        shuffle: bool = True,
        max_bad_share: float = 1.0,
        reads_ahead: bool = True,
    ) -> None:
        self._reads_ahead = reads_ahead
        self._seed = seed
        self._shuffle = shuffle
        self._max_bad_share = max_bad_share
        self._skipped = SkippedRows()
        self._set_data(data)

    def _set_data(self, data: StreamData) -> None:
        self._data = data
        zeros = (0,) * len(data.stream_files)
        self._num_drawn, self._num_prompts = zeros, zeros
        self._prefetched: deque[DrawnPrompt] = deque()
        self._node: InterleaveNode | None = None

    def __len__(self) -> int:
        """Rows per epoch, of all files."""
        return sum(len(part.indices) for part in self._data.stream_files)

    def __next__(self) -> Prompt:
        """The next prompt; there always is one. Raises DataError if the data gives none."""
        if not self._prefetched:
            self._fill_buffer(1)
        drawn = self._prefetched.popleft()
        self._num_drawn, self._num_prompts = drawn.position.num_drawn, drawn.position.num_prompts
        self._skipped.add(drawn.skipped)
        return drawn.prompt

    def draw_prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return [next(self) for _ in range(count)]

    async def prefetch_prompts(self, count: int) -> None:
        """Have the next `count` prompts at hand: an event loop need not wait for what reads them.

        Nobody draws meanwhile.
        """
        if len(self._prefetched) < count:
            await asyncio.to_thread(self._fill_buffer, count)

    def _fill_buffer(self, count: int) -> None:
        while len(self._prefetched) < count:
            self._prefetched.append(next(self._get_node()))

    def _get_node(self) -> "InterleaveNode":
        """The nodes that read the files, in the process that draws; they take torch."""
        if self._node is None:
            from streamrl.data.prefetch import PREFETCH_BATCHES, InterleaveNode

            self._node = InterleaveNode(
                self._data.stream_files,
                seed=self._seed,
                shuffle=self._shuffle,
                max_bad_share=self._max_bad_share,
                ahead=PREFETCH_BATCHES if self._reads_ahead else 0,
            )
            self._node.reset({"drawn": self._num_drawn, "given": self._num_prompts})
        return self._node

    def take_skipped(self) -> "SkippedRows":
        """The rows since the last call that gave no prompt, or a shorter one."""
        skipped, self._skipped = self._skipped, SkippedRows()
        return skipped

    def get_prompt(self, uid: str) -> Prompt:
        """The prompt of a uid this stream gave out, now or before a resume; the place is kept.

        Any attempt will do. Raises ValueError for a uid whose index is not in the data, and
        DataError for one whose row gives no prompt any more.
        """
        _, index, _ = parse_uid(uid)
        for part in self._data.stream_files:
            at = int(part.indices.searchsorted(index))
            if at < len(part.indices) and part.indices[at] == index:
                (found,) = part.classify_indices([index])
                if found.prompt is None:
                    raise DataError(f"uid {uid}: {found.problem or found.status.value}")
                return replace(found.prompt, uid=uid)
        raise ValueError(f"uid {uid}: no prompt with index {index} among the {len(self)}")

    def retry_prompt(self, uid: str) -> Prompt:
        """The prompt of a dropped uid under the uid of its next attempt."""
        epoch, index, attempt = parse_uid(uid)
        return self.get_prompt(make_uid(epoch, index, attempt + 1))

    @property
    def _stream_identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self),
            "fingerprint": self._data.fingerprint,
            "files": [[len(part.indices), part.fraction] for part in self._data.stream_files],
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON: how much of each file has been drawn, and given out."""
        return {
            "drawn": list(self._num_drawn),
            "given": list(self._num_prompts),
            **self._stream_identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the stream that wrote `state` stood.

        Raises ConfigError if that stream had other prompts or another order: some rows of the
        epoch would be lost and others trained twice. Checkpoints used to be of streams whose rows
        had all been examined: then they are, as the order is that of those that gave prompts.
        """
        data = self._data
        if not data.is_fully_classified and is_full_fingerprint(str(state["fingerprint"])):
            data = data.classify_all_rows()
        self._set_data(data)
        for name, now in self._stream_identity.items():
            if state[name] != now:
                raise ConfigError(
                    f"cannot resume the data stream: {_IDENTITY_TEXTS[name]} was"
                    f" {state[name]} when the "
                    f"checkpoint was written and is {now} now; use the same, or start a new run"
                )
        # Before, checkpoints had it as torchdata's loader wrote it.
        place = state["loader"]["_sampler_iter_state"] if "loader" in state else state
        drawn, given = place["drawn"], place.get("given", place["drawn"])
        num_files = len(data.stream_files)
        pairs = list(zip(given, drawn, strict=False))
        fits = [isinstance(n, int) and isinstance(m, int) and 0 <= n <= m for n, m in pairs]
        if not all(fits) or not len(drawn) == len(given) == num_files:
            raise ValueError(f"{drawn} prompts drawn of {num_files} files, {given} given out")
        self._num_drawn, self._num_prompts = tuple(drawn), tuple(given)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_node": None, "_prefetched": deque()}


#: What must be the same on resume, in words for the user.
_IDENTITY_TEXTS = {
    "num_prompts": "the number of prompts in data.train",
    "fingerprint": "the content of data.train as tokens (fingerprint)",
    "files": "what each file of data.train has of prompts and of the stream",
    "shuffle": "data.shuffle",
    "seed": "the seed of the data order",
}
PARTIAL_PREFIX = "rows-"
"""Begins the fingerprint of data of which some rows only have been examined."""


def is_full_fingerprint(fingerprint: str) -> bool:
    """Whether a fingerprint is of data of which every row has been examined."""
    return not fingerprint.startswith(PARTIAL_PREFIX)


class SkippedRows:
    """Rows that a stream passed over, or cut: how many by what became of them.

    problems: why the first of those that cannot be used cannot be, each with the row's place.
    """

    def __init__(self) -> None:
        self._counts: Counter[RowStatus] = Counter()
        self.problems: list[str] = []

    def add(self, rows: Sequence[ClassifiedRow]) -> None:
        """Count rows."""
        self._counts.update(row.status for row in rows)
        told = [str(row.problem) for row in rows if row.problem is not None]
        self.problems += told[: MAX_REPORTED_ROWS - len(self.problems)]

    @property
    def metrics(self) -> dict[str, int]:
        """A count for each way to be left out or cut, 0 too."""
        return {f"data/{name}": self._counts[fate] for fate, name in _METRIC_NAMES.items()}


_METRIC_NAMES = {
    fate: fate.value.replace(" ", "_") for fate in RowStatus if fate is not RowStatus.KEPT
}
