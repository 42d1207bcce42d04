"""Training files of the prompt stream, checked in part before a run and on demand afterwards.

Before a run every row of a small file is read, rendered and checked (classified). Of a larger file
only a sample is: the first rows, rows spread evenly, and the longest rows, which bound the length
of all prompts.
"""

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamrl.data.config import DataFile
from streamrl.data.prompt_file import (
    RENDER_BATCH_ROWS,
    PromptFile,
    PromptLimits,
    RowStatus,
    describe_unused_rows,
    make_no_prompt_error,
)
from streamrl.messages import Prompt, parse_uid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_FULLY_CLASSIFIED_ROWS = 10_000
"""Largest file, in rows, that is classified completely before a run."""
NUM_FIRST_ROWS, NUM_SPREAD_ROWS, NUM_LONGEST_ROWS = 2048, 1024, 1024
"""Sample of a larger file: first rows, evenly spread rows, and longest rows."""
LENGTH_MARGIN = 1.25
"""Allowed prompt length relative to the longest prompt in the sample."""

COLUMNS_MARK = "+"
"""Separates the hash of the prompts, in a fingerprint, from that of their other columns."""
PARTIAL_PREFIX = "rows-"
"""Prefix of the fingerprint of partly classified data."""

PromptInspector = Callable[[Sequence[Prompt]], None]


@dataclass(frozen=True)
class TrainingFile:
    """Training file with statistics of the rows classified before the run.

    row_indices: uid indices of the rows to draw: usable rows if the file is fully classified, else
    all rows. max_prompt_tokens, mean_prompt_tokens: over the classified rows.
    """

    prompt_file: PromptFile
    row_indices: NDArray[np.int64]
    is_fully_classified: bool
    status_counts: Mapping[RowStatus, int]
    max_prompt_tokens: int
    mean_prompt_tokens: float

    @property
    def notes(self) -> list[str]:
        file, num_classified = self.prompt_file.file, sum(self.status_counts.values())
        if self.is_fully_classified:
            return describe_unused_rows(file, self.status_counts)
        note = (
            f"{file.path}: {num_classified} of {len(self.row_indices)} rows checked, the"
            f" rest when drawn;"
            f" prompts may have {self.prompt_file.limits.max_tokens} tokens"
        )
        suffix = f", of {num_classified} checked"
        return [note, *describe_unused_rows(file, self.status_counts, suffix)]


@dataclass(frozen=True)
class TrainingFiles:
    """Training files of a prompt stream; the index in a prompt's uid is unique among all files.

    fingerprint: hashes of all prompts and of their other columns, or of whole files and settings if
    rows were sampled.
    """

    files: tuple[TrainingFile, ...]
    fingerprint: str

    @property
    def shares(self) -> list[float]:
        """Share of each file in the stream's prompts, by weight or else in proportion to rows."""
        weights = [
            float(len(file.row_indices))
            if file.prompt_file.file.weight is None
            else file.prompt_file.file.weight
            for file in self.files
        ]
        return [weight / sum(weights) for weight in weights]

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt, or the length limit of files classified only in part."""
        return max(
            file.max_prompt_tokens
            if file.is_fully_classified
            else file.prompt_file.limits.max_tokens
            for file in self.files
        )

    @property
    def mean_prompt_tokens(self) -> float:
        pairs = zip(self.shares, self.files, strict=True)
        return sum(share * file.mean_prompt_tokens for share, file in pairs)


def open_training_files(
    files: Sequence[DataFile],
    tokenizer: "Callable[[], PreTrainedTokenizerBase]",
    limits: PromptLimits,
    *,
    max_sampled_tokens: float | None = math.inf,
    inspect: PromptInspector = lambda prompts: None,
) -> TrainingFiles:
    """Open training files, and classify every row of small ones and a sample of larger ones.

    In a sampled file prompts may exceed the longest sampled prompt by LENGTH_MARGIN, up to
    max_sampled_tokens; None allows as many as `limits`. inspect: receives the classified prompts.
    Raises a one-line ConfigError with file, row and rule for the first bad row among those
    classified, an unusable file, template or filter, or a file without any usable row.
    """
    opened, first = [], 0
    for file in files:
        opened.append(PromptFile(file, tokenizer, limits, first=first))
        first = int(opened[-1].indices[-1]) + 1
    digests = tuple(hashlib.blake2b(digest_size=8) for _ in range(2))
    classify = partial(
        _classify_file, inspect=inspect, digests=digests, max_sampled_tokens=max_sampled_tokens
    )
    classified: list[TrainingFile] = []
    for prompts in opened:
        sampled = classify(prompts, *choose_rows(prompts))
        # If no sampled row is usable, search the whole file for one.
        complete = None if sampled else classify(prompts, *choose_rows(prompts, math.inf))
        classified += filter(None, (sampled, complete))
    fingerprint = COLUMNS_MARK.join(digest.hexdigest() for digest in digests)
    if not all(file.is_fully_classified for file in classified):
        # The sampled rows do not identify the data, so hash all content and settings.
        for part in classified:
            facts = f"{part.prompt_file.table.digest} {part.prompt_file.settings_text}"
            digests[0].update(facts.encode())
        fingerprint = PARTIAL_PREFIX + digests[0].hexdigest()
    return TrainingFiles(tuple(classified), fingerprint)


def _classify_file(
    file: PromptFile,
    rows: NDArray[np.int64],
    is_typical: NDArray[np.bool_],
    *,
    inspect: PromptInspector,
    digests: "Sequence[hashlib.blake2b]",
    max_sampled_tokens: float | None,
) -> TrainingFile | None:
    """Render and check rows of a file before a run; return None if none of them is usable.

    is_typical: rows that were not chosen for their length, which would bias the mean. digests:
    hashes to which the rows are added, of prompts and of all other columns. Raises ConfigError for
    the first bad row, or if the whole file has no usable one.
    """
    counts, kept = Counter[RowStatus](), array("q")
    lengths, typical = array("i"), array("i")
    for start in range(0, len(rows), RENDER_BATCH_ROWS):
        part = slice(start, start + RENDER_BATCH_ROWS)
        batch = file.make_prompts(file.indices[rows[part]])
        if problem := next(filter(None, (row.problem for row in batch)), None):
            raise problem
        inspect([row.prompt for row in batch if row.prompt is not None])
        for row, is_row_typical in zip(batch, is_typical[part], strict=True):
            counts[row.status] += 1
            if row.prompt is not None:
                kept.append(parse_uid(row.prompt.uid)[1])
                lengths.append(row.num_tokens)
                if is_row_typical:
                    typical.append(row.num_tokens)
                hash_prompt(digests[0], digests[1], row.prompt)
    is_complete, limits = len(rows) == len(file.table), file.limits
    if not kept:
        if is_complete:
            raise make_no_prompt_error(file.file, counts, limits)
        return None
    longest, mean = max(lengths), fmean(typical or lengths)
    if is_complete:
        return TrainingFile(file, np.array(kept), True, counts, longest, mean)
    limit = limits.max_tokens
    if max_sampled_tokens is not None:
        with_margin = int(min(math.ceil(longest * LENGTH_MARGIN), max_sampled_tokens))
        limit = min(limit, max(longest, with_margin))
    limited = copy(file)
    limited.limits = replace(limits, max_tokens=limit)
    return TrainingFile(limited, file.indices, False, counts, longest, mean)


def choose_rows(
    file: PromptFile, max_full_rows: float | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the rows to classify before a run, sorted, and which were not chosen for length."""
    size = len(file.table)
    if size <= (MAX_FULLY_CLASSIFIED_ROWS if max_full_rows is None else max_full_rows):
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


def hash_prompt(
    digest: "hashlib.blake2b", columns_digest: "hashlib.blake2b", prompt: Prompt
) -> None:
    """Add a prompt to a hash, and its other columns, which rewards may read, to another."""
    facts: tuple[Any, ...] = (parse_uid(prompt.uid)[1], prompt.data_source, prompt.ground_truth)
    # Runs of versions without named environments must find the hash of their data unchanged.
    facts += (prompt.environment,) if prompt.environment else ()
    digest.update(repr((facts, len(prompt.token_ids))).encode("utf-8", "backslashreplace"))
    digest.update(prompt.token_ids.astype(np.int32).tobytes())
    columns = (prompt.messages, sorted(prompt.extra_info.items()))
    columns_digest.update(repr(columns).encode("utf-8", "backslashreplace"))
