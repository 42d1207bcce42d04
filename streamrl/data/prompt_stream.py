"""Endless stream of prompts that resumes at the exact row.

Rows are read, rendered and checked shortly before use. The position of the stream is two counts
per file: rows drawn, and prompts obtained from them.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from streamrl.data.classify_rows import ClassifiedRow, RowStatus
from streamrl.errors import ConfigError, DataError
from streamrl.messages import Prompt, make_uid, parse_uid

if TYPE_CHECKING:
    from streamrl.data.prefetch import DrawnPrompt, InterleaveNode
    from streamrl.data.training_files import TrainingFiles

MAX_REPORTED_ROWS = 10
"""Bad rows between two calls of `take_skipped` that are described; further rows are counted."""


class PromptStream(Iterator[Prompt]):
    """Endless iterator over the prompts of all files: every row once per epoch of its file.

    Each file has its own epochs, shuffled by (seed, file, epoch). A prompt has uid (epoch, index,
    0). Rows without a prompt are skipped and reported by `take_skipped`; if a file's share of
    unusable rows exceeds `max_bad_share`, drawing raises DataError. A thread per file prefetches
    rows unless `reads_ahead` is false.
    """

    def __init__(
        self,
        data: "TrainingFiles",
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

    def _set_data(self, data: "TrainingFiles") -> None:
        self._data = data
        zeros = (0,) * len(data.stream_files)
        self._num_drawn, self._num_prompts = zeros, zeros
        self._prefetched: deque[DrawnPrompt] = deque()
        self._node: InterleaveNode | None = None

    def __len__(self) -> int:
        return sum(len(file.indices) for file in self._data.stream_files)

    def __next__(self) -> Prompt:
        """Return the next prompt. Raises DataError if rows cannot be read, or too many are bad."""
        if not self._prefetched:
            self._fill_buffer(1)
        drawn = self._prefetched.popleft()
        self._num_drawn, self._num_prompts = drawn.position.num_drawn, drawn.position.num_prompts
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
            self._prefetched.append(next(self._get_node()))

    def _get_node(self) -> "InterleaveNode":
        """Return the torchdata node that yields the prompts; create the node on first use.

        A pickled stream has no node. torchdata imports torch.
        """
        if self._node is None:
            from streamrl.data.prefetch import PREFETCH_BATCHES, InterleaveNode

            self._node = InterleaveNode(
                self._data.stream_files,
                seed=self._seed,
                shuffle=self._shuffle,
                max_bad_share=self._max_bad_share,
                prefetch_batches=PREFETCH_BATCHES if self._reads_ahead else 0,
            )
            self._node.reset({"drawn": self._num_drawn, "given": self._num_prompts})
        return self._node

    def take_skipped(self) -> "SkippedRows":
        """Return counts of the rows skipped or truncated since the last call, and reset them."""
        skipped, self._skipped = self._skipped, SkippedRows()
        return skipped

    def get_prompt(self, uid: str) -> Prompt:
        """Return the prompt of a uid, of any attempt, without advancing the stream.

        Raises ValueError for an index outside the data, and DataError if the row no longer yields a
        prompt.
        """
        _, index, _ = parse_uid(uid)
        for file in self._data.stream_files:
            position = int(file.indices.searchsorted(index))
            if position < len(file.indices) and file.indices[position] == index:
                (row,) = file.classify_indices([index])
                if row.prompt is None:
                    raise DataError(f"uid {uid}: {row.problem or row.status.value}")
                return replace(row.prompt, uid=uid)
        raise ValueError(f"uid {uid}: no prompt with index {index} among the {len(self)}")

    def retry_prompt(self, uid: str) -> Prompt:
        epoch, index, attempt = parse_uid(uid)
        return self.get_prompt(make_uid(epoch, index, attempt + 1))

    @property
    def _stream_identity(self) -> dict[str, Any]:
        """Facts about data and order that must not change when the stream resumes."""
        return {
            "num_prompts": len(self),
            "fingerprint": self._data.fingerprint,
            "files": [[len(file.indices), file.fraction] for file in self._data.stream_files],
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "drawn": list(self._num_drawn),
            "given": list(self._num_prompts),
            **self._stream_identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the stream that wrote `state` stopped.

        Raises ConfigError if that stream had other prompts or another order, which would lose some
        rows of the epoch and repeat others. Old checkpoints come from streams that classified every
        row first; then this stream does the same, because its order skips unusable rows.
        """
        data = self._data
        if not data.is_fully_classified and is_full_fingerprint(str(state["fingerprint"])):
            data = data.classify_all_rows()
        self._set_data(data)
        for name, now in self._stream_identity.items():
            if name == "fingerprint" and COLUMNS_MARK not in state[name]:
                now = now.partition(COLUMNS_MARK)[0]  # earlier versions hashed the prompts only
            if state[name] != now:
                raise ConfigError(
                    f"cannot resume the data stream: {_IDENTITY_TEXTS[name]} was"
                    f" {state[name]} in the "
                    f"checkpoint and is {now} now; restore it, or start a new run"
                )
        # Old checkpoints nest the position as torchdata's StatefulDataLoader did.
        position = state["loader"]["_sampler_iter_state"] if "loader" in state else state
        drawn, given = position["drawn"], position.get("given", position["drawn"])
        num_files = len(data.stream_files)
        pairs = list(zip(given, drawn, strict=False))
        is_valid = [isinstance(n, int) and isinstance(m, int) and 0 <= n <= m for n, m in pairs]
        if not all(is_valid) or not len(drawn) == len(given) == num_files:
            raise ValueError(f"{drawn} rows drawn from {num_files} files, {given} prompts obtained")
        self._num_drawn, self._num_prompts = tuple(drawn), tuple(given)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_node": None, "_prefetched": deque()}


#: Facts that must not change on resume, as users know them.
_IDENTITY_TEXTS = {
    "num_prompts": "the number of prompts in data.train",
    "fingerprint": "the content of data.train, prompts and other columns (fingerprint),",
    "files": "the row count and stream share of each file in data.train",
    "shuffle": "data.shuffle",
    "seed": "the seed of the data order",
}
COLUMNS_MARK = "+"
"""Separates the hash of the prompts, in a fingerprint, from that of their other columns."""
PARTIAL_PREFIX = "rows-"
"""Prefix of the fingerprint of partly classified data."""


def is_full_fingerprint(fingerprint: str) -> bool:
    """Return whether a fingerprint of the data covers every prompt, not only a sample."""
    return not fingerprint.startswith(PARTIAL_PREFIX)


class SkippedRows:
    """Counts of data rows that the prompt stream skipped or truncated, by status.

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
        return {f"data/{name}": self._counts[status] for status, name in _METRIC_NAMES.items()}


_METRIC_NAMES = {
    status: status.value.replace(" ", "_") for status in RowStatus if status is not RowStatus.KEPT
}
