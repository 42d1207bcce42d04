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
from streamrl.data.classify_rows import BATCH, Examined, Fate, Limits
from streamrl.data.files import DataFile
from streamrl.data.interleave import Part
from streamrl.data.prompt_file import LazyTokenizer, PromptFile
from streamrl.data.prompt_stream import ROWS
from streamrl.data.prompts import no_prompt_left, notes_of
from streamrl.messages import Prompt, parse_uid

WHOLE = 10_000
"""Rows of a file up to which all are examined before a run."""
FIRST, SPREAD, LONGEST = 2048, 1024, 1024
"""Rows of a larger file that are examined: its first, others all over it, and its longest."""
MARGIN = 1.25
"""Prompts of a run may be longer than the longest that was examined by this factor."""

Inspect = Callable[[Sequence[Prompt]], None]


@dataclass(frozen=True)
class OpenedFile:
    """A file, and what its examined rows are like.

    rows: the indices of the rows that a stream draws: of a file that was examined whole, those that
    give prompts; of another, all. fates: of the examined rows. longest, mean: tokens of their
    prompts.
    """

    prompts: PromptFile
    rows: NDArray[np.int64]
    is_whole: bool
    fates: Mapping[Fate, int]
    longest: int
    mean: float

    @property
    def notes(self) -> list[str]:
        """What the user should know of the rows that were examined."""
        file, examined = self.prompts.file, sum(self.fates.values())
        if self.is_whole:
            return notes_of(file, self.fates)
        more = f", of {examined} that were examined"
        begun = (
            f"{file.path}: {examined} of {len(self.rows)} rows were examined, the others are as"
            f" they are drawn; prompts may have {self.prompts.limits.max_tokens} tokens"
        )
        return [begun, *notes_of(file, self.fates, more)]


@dataclass(frozen=True)
class OpenedFiles:
    """The files of a stream. No two prompts have the same index in their uid."""

    files: tuple[OpenedFile, ...]
    fingerprint: str

    @property
    def parts(self) -> list[Part]:
        """The files, each with its share: as its weight is, else as its rows are many."""
        weights = [
            float(len(one.rows)) if one.prompts.file.weight is None else one.prompts.file.weight
            for one in self.files
        ]
        return [
            Part(one.rows, weight / sum(weights), one.prompts.examine, one.prompts.file.path)
            for one, weight in zip(self.files, weights, strict=True)
        ]

    @property
    def is_whole(self) -> bool:
        """Whether every row was examined."""
        return all(one.is_whole for one in self.files)

    @property
    def longest(self) -> int:
        """Most tokens that a prompt has, or may have where rows are not known yet."""
        return max(
            one.longest if one.is_whole else one.prompts.limits.max_tokens for one in self.files
        )

    @property
    def mean_tokens(self) -> float:
        """Tokens of a prompt, on average over the stream."""
        return sum(part.share * one.mean for part, one in zip(self.parts, self.files, strict=True))

    def whole(self) -> "OpenedFiles":
        """Examine every row of all files. Raises ConfigError for one that cannot be used."""
        return open_prompts([one.prompts for one in self.files], whole=math.inf)


def open_files(
    files: Sequence[DataFile],
    model: str,
    *,
    limit: int,
    on_long: str,
    room: float | None = math.inf,
    inspect: Inspect = lambda prompts: None,
) -> OpenedFiles:
    """Open training files as the model of a directory reads them, of at most `limit` tokens each.

    A prompt of a large file may be longer than the longest that was examined by MARGIN, as far as
    it has no more than `room` tokens; None: it may have `limit`. `inspect` is shown what is
    examined. Raises ConfigError in one line naming file, row and rule: the problem of the first
    examined row that is bad, a file, template or filter that cannot be used, and a file that gives
    no prompt.
    """
    tokenizer, limits = LazyTokenizer(model), Limits(limit, load_vocab_size(model), on_long)
    opened, first = [], 0
    for file in files:
        prompts = PromptFile(file, tokenizer, limits, first=first)
        opened.append(prompts)
        first = int(prompts.indices[-1]) + 1
    return open_prompts(opened, inspect, room=room)


def open_prompts(
    files: Sequence[PromptFile],
    inspect: Inspect = lambda prompts: None,
    *,
    whole: float = WHOLE,
    room: float | None = math.inf,
) -> OpenedFiles:
    """Examine files before a run; those of up to `whole` rows wholly. See `open_files`."""
    digest = hashlib.blake2b(digest_size=8)
    found = [_examined(file, inspect, digest, whole=whole, room=room) for file in files]
    fingerprint = digest.hexdigest()
    if not all(one.is_whole for one in found):
        for one in found:
            digest.update(f"{one.prompts.table.digest} {one.prompts.settings}".encode())
        fingerprint = ROWS + digest.hexdigest()
    return OpenedFiles(tuple(found), fingerprint)


def _examined(
    file: PromptFile,
    inspect: Inspect,
    digest: "hashlib.blake2b",
    *,
    whole: float,
    room: float | None,
) -> OpenedFile:
    rows, is_typical = chosen_rows(file, whole)
    is_whole = len(rows) == len(file.table)
    fates, kept, lengths, typical = Counter[Fate](), array("q"), array("i"), array("i")
    for start in range(0, len(rows), BATCH):
        found = file.examine_rows(rows[start : start + BATCH].tolist())
        _raise_first(found)
        inspect([one.prompt for one in found if one.prompt is not None])
        for one, stands_for_others in zip(found, is_typical[start : start + BATCH], strict=True):
            fates[one.fate] += 1
            if one.prompt is not None:
                kept.append(parse_uid(one.prompt.uid)[1])
                lengths.append(len(one.prompt.token_ids))
                if stands_for_others:
                    typical.append(lengths[-1])
                add_prompt(digest, one.prompt)
    if not kept and not is_whole:
        # Among the others there may be one.
        return _examined(file, inspect, digest, whole=math.inf, room=room)
    if not kept:
        raise no_prompt_left(file.file, fates, file.limits)
    longest, mean = max(lengths), fmean(typical or lengths)
    if is_whole:
        return OpenedFile(file, np.array(kept), True, fates, longest, mean)
    most = file.limits.max_tokens
    if room is not None:
        most = min(most, max(longest, int(min(math.ceil(longest * MARGIN), room))))
    limited = file.with_limits(replace(file.limits, max_tokens=most))
    return OpenedFile(limited, limited.indices, False, fates, longest, mean)


def _raise_first(found: Sequence[Examined]) -> None:
    """Raise the problem of the first row that is bad."""
    for one in found:
        if one.problem is not None:
            raise one.problem


def chosen_rows(file: PromptFile, whole: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose the rows of a file that are examined before a run, in their order.

    Returned beside them: whether each is one of those that stand for the others.
    """
    size = len(file.table)
    if size <= whole:
        return np.arange(size), np.ones(size, np.bool_)
    typical = np.union1d(np.arange(FIRST), np.linspace(0, size - 1, SPREAD).astype(np.int64))
    sizes = file.table.prompt_sizes(file.file.prompt_key)
    if sizes is None:
        return typical, np.ones(len(typical), np.bool_)
    rows = np.union1d(typical, np.argpartition(sizes, size - LONGEST)[size - LONGEST :])
    return rows, np.isin(rows, typical)


def add_prompt(digest: "hashlib.blake2b", prompt: Prompt) -> None:
    """Add what a run learns from to a hash: index, tokens, source and ground truth of a prompt."""
    facts = (parse_uid(prompt.uid)[1], prompt.data_source, prompt.ground_truth)
    digest.update(repr((facts, len(prompt.token_ids))).encode("utf-8", "backslashreplace"))
    digest.update(prompt.token_ids.astype(np.int32).tobytes())
