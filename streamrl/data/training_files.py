"""Training files as a stream reads them: a row is read, rendered and checked once it is drawn.

Before a run all rows of a small file are examined; of a larger one the first, others spread evenly
over it, and the longest, which tell how long prompts may be.
"""

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from streamrl.data.chat_template import load_vocab_size
from streamrl.data.classify_rows import RENDER_BATCH_ROWS, ClassifiedRow, PromptLimits, RowStatus
from streamrl.data.files import DataFile
from streamrl.data.interleave import StreamFile
from streamrl.data.prompt_file import LazyTokenizer, PromptFile
from streamrl.data.prompt_stream import PARTIAL_PREFIX
from streamrl.data.prompts import describe_unused_rows, make_no_prompt_error
from streamrl.messages import Prompt, parse_uid

MAX_FULLY_CLASSIFIED_ROWS = 10_000
"""Rows of a file up to which all are examined before a run."""
NUM_FIRST_ROWS, NUM_SPREAD_ROWS, NUM_LONGEST_ROWS = 2048, 1024, 1024
"""Rows of a larger file that are examined: its first, others all over it, and its longest."""
LENGTH_MARGIN = 1.25
"""Prompts of a run may be longer than the longest that was examined by this factor."""

PromptInspector = Callable[[Sequence[Prompt]], None]


@dataclass(frozen=True)
class TrainingFile:
    """A file, and what its examined rows are like.

    rows: the indices of the rows that a stream draws: of a file that was examined whole, those that
    give prompts; of another, all. fates: of the examined rows. longest, mean: tokens of their
    prompts.
    """

    prompt_file: PromptFile
    row_indices: NDArray[np.int64]
    is_fully_classified: bool
    status_counts: Mapping[RowStatus, int]
    max_prompt_tokens: int
    mean_prompt_tokens: float

    @property
    def notes(self) -> list[str]:
        """What the user should know of the rows that were examined."""
        file, examined = self.prompt_file.file, sum(self.status_counts.values())
        if self.is_fully_classified:
            return describe_unused_rows(file, self.status_counts)
        more = f", of {examined} that were examined"
        begun = (
            f"{file.path}: {examined} of {len(self.row_indices)} rows were examined, the"
            f" others are as"
            f" they are drawn; prompts may have {self.prompt_file.limits.max_tokens} tokens"
        )
        return [begun, *describe_unused_rows(file, self.status_counts, more)]


@dataclass(frozen=True)
class TrainingFiles:
    """The files of a stream. No two prompts have the same index in their uid."""

    files: tuple[TrainingFile, ...]
    fingerprint: str

    @property
    def stream_files(self) -> list[StreamFile]:
        """The files, each with its share: as its weight is, else as its rows are many."""
        weights = [
            float(len(one.row_indices))
            if one.prompt_file.file.weight is None
            else one.prompt_file.file.weight
            for one in self.files
        ]
        return [
            StreamFile(
                one.row_indices,
                weight / sum(weights),
                one.prompt_file.classify_indices,
                one.prompt_file.file.path,
            )
            for one, weight in zip(self.files, weights, strict=True)
        ]

    @property
    def is_fully_classified(self) -> bool:
        """Whether every row was examined."""
        return all(one.is_fully_classified for one in self.files)

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens that a prompt has, or may have where rows are not known yet."""
        return max(
            one.max_prompt_tokens if one.is_fully_classified else one.prompt_file.limits.max_tokens
            for one in self.files
        )

    @property
    def mean_prompt_tokens(self) -> float:
        """Tokens of a prompt, on average over the stream."""
        return sum(
            part.fraction * one.mean_prompt_tokens
            for part, one in zip(self.stream_files, self.files, strict=True)
        )

    def classify_all_rows(self) -> "TrainingFiles":
        """Examine every row of all files. Raises ConfigError for one that cannot be used."""
        return classify_training_files([one.prompt_file for one in self.files], whole=math.inf)


def open_training_files(
    files: Sequence[DataFile],
    model: str,
    *,
    limit: int,
    on_long: str,
    room: float | None = math.inf,
    inspect: PromptInspector = lambda prompts: None,
) -> TrainingFiles:
    """Open training files as the model of a directory reads them, of at most `limit` tokens each.

    A prompt of a large file may be longer than the longest that was examined by MARGIN, as far as
    it has no more than `room` tokens; None: it may have `limit`. `inspect` is shown what is
    examined. Raises ConfigError in one line naming file, row and rule: the problem of the first
    examined row that is bad, a file, template or filter that cannot be used, and a file that gives
    no prompt.
    """
    tokenizer, limits = LazyTokenizer(model), PromptLimits(limit, load_vocab_size(model), on_long)
    opened, first = [], 0
    for file in files:
        prompts = PromptFile(file, tokenizer, limits, first=first)
        opened.append(prompts)
        first = int(prompts.indices[-1]) + 1
    return classify_training_files(opened, inspect, room=room)


def classify_training_files(
    files: Sequence[PromptFile],
    inspect: PromptInspector = lambda prompts: None,
    *,
    whole: float = MAX_FULLY_CLASSIFIED_ROWS,
    room: float | None = math.inf,
) -> TrainingFiles:
    """Examine files before a run; those of up to `whole` rows wholly. See `open_files`."""
    digest = hashlib.blake2b(digest_size=8)
    found = [_classify_file(file, inspect, digest, whole=whole, room=room) for file in files]
    fingerprint = digest.hexdigest()
    if not all(one.is_fully_classified for one in found):
        for one in found:
            digest.update(
                f"{one.prompt_file.table.digest} {one.prompt_file.settings_text}".encode()
            )
        fingerprint = PARTIAL_PREFIX + digest.hexdigest()
    return TrainingFiles(tuple(found), fingerprint)


def _classify_file(
    file: PromptFile,
    inspect: PromptInspector,
    digest: "hashlib.blake2b",
    *,
    whole: float,
    room: float | None,
) -> TrainingFile:
    rows, is_typical = choose_rows(file, whole)
    is_whole = len(rows) == len(file.table)
    fates, kept, lengths, typical = Counter[RowStatus](), array("q"), array("i"), array("i")
    for start in range(0, len(rows), RENDER_BATCH_ROWS):
        found = file.classify_rows(rows[start : start + RENDER_BATCH_ROWS].tolist())
        _raise_first_problem(found)
        inspect([one.prompt for one in found if one.prompt is not None])
        for one, stands_for_others in zip(
            found, is_typical[start : start + RENDER_BATCH_ROWS], strict=True
        ):
            fates[one.status] += 1
            if one.prompt is not None:
                kept.append(parse_uid(one.prompt.uid)[1])
                lengths.append(len(one.prompt.token_ids))
                if stands_for_others:
                    typical.append(lengths[-1])
                hash_prompt(digest, one.prompt)
    if not kept and not is_whole:
        # Among the others there may be one.
        return _classify_file(file, inspect, digest, whole=math.inf, room=room)
    if not kept:
        raise make_no_prompt_error(file.file, fates, file.limits)
    longest, mean = max(lengths), fmean(typical or lengths)
    if is_whole:
        return TrainingFile(file, np.array(kept), True, fates, longest, mean)
    most = file.limits.max_tokens
    if room is not None:
        most = min(most, max(longest, int(min(math.ceil(longest * LENGTH_MARGIN), room))))
    limited = file.with_limits(replace(file.limits, max_tokens=most))
    return TrainingFile(limited, limited.indices, False, fates, longest, mean)


def _raise_first_problem(found: Sequence[ClassifiedRow]) -> None:
    """Raise the problem of the first row that is bad."""
    for one in found:
        if one.problem is not None:
            raise one.problem


def choose_rows(file: PromptFile, whole: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose the rows of a file that are examined before a run, in their order.

    Returned beside them: whether each is one of those that stand for the others.
    """
    size = len(file.table)
    if size <= whole:
        return np.arange(size), np.ones(size, np.bool_)
    typical = np.union1d(
        np.arange(NUM_FIRST_ROWS), np.linspace(0, size - 1, NUM_SPREAD_ROWS).astype(np.int64)
    )
    sizes = file.table.get_prompt_sizes(file.file.prompt_key)
    if sizes is None:
        return typical, np.ones(len(typical), np.bool_)
    rows = np.union1d(
        typical, np.argpartition(sizes, size - NUM_LONGEST_ROWS)[size - NUM_LONGEST_ROWS :]
    )
    return rows, np.isin(rows, typical)


def hash_prompt(digest: "hashlib.blake2b", prompt: Prompt) -> None:
    """Add what a run learns from to a hash: index, tokens, source and ground truth of a prompt."""
    facts = (parse_uid(prompt.uid)[1], prompt.data_source, prompt.ground_truth)
    digest.update(repr((facts, len(prompt.token_ids))).encode("utf-8", "backslashreplace"))
    digest.update(prompt.token_ids.astype(np.int32).tobytes())
