"""Prompt files with random access: rows are read, rendered and checked on demand.

Each row becomes a prompt, or the reason to skip it. Before a run every row of a small training file
is classified so. Of a larger file only a sample is: the first rows, rows spread evenly, and the
longest rows, which bound the length of all prompts.
"""

import hashlib
import math
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streamrl.data.chat_template import (
    ChatTemplate,
    load_chat_template,
    load_tokenizer,
    render_prompts,
)
from streamrl.data.config import MODEL_TEMPLATE, PLAIN_TEMPLATE, DataFile
from streamrl.data.indexed_table import IndexedTable, open_table
from streamrl.data.rows import DataRow, parse_record
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import MAX_LINE_BYTES, open_regular_file
from streamrl.files.hf_config import is_trusted, make_trusted_env
from streamrl.files.python_module import load_referenced_function
from streamrl.messages import ROLLOUTS, Prompt, make_uid, parse_uid
from streamrl.user_code.checks import format_returned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RenderedRow = tuple[list[int], Sequence[tuple[bytes, bytes]]]
"""Token ids of a prompt, and the targets that the row gives."""


class RowRenderer(Protocol):
    """Renderer of rows that give completions; see `TargetRenderer`."""

    def render_row(self, row: DataRow) -> RenderedRow: ...


MakeRenderer = Callable[["PreTrainedTokenizerBase", ChatTemplate, str], RowRenderer]
PromptFilter = Callable[[Prompt, str], bool]
"""Takes a prompt and its location for errors; returns whether to keep the prompt."""
MAX_RENDERED_ROWS = 50_000
"""Rows with completions of a file that are kept rendered; several turns take milliseconds."""
RECORDED_FOLDER = "rollouts"
"""Folder of a run directory with its recorded rollouts."""
RENDER_BATCH_ROWS = 512
"""Rows per batch of a sequential read and per tokenizer call."""
_render_lock = threading.Lock()
"""Serializes rendering: neither tokenizers nor user filters are thread-safe."""


@dataclass(frozen=True)
class PromptLimits:
    """Limits of a prompt: length in tokens, size of the vocabulary, action on a longer prompt.

    on_long: "error" or "skip". environments: names of the run's environments, ("",) for
    a single one without a name, () for a run without any; None accepts all names.
    """

    max_tokens: int
    vocab_size: int
    on_long: str = "error"
    environments: tuple[str, ...] | None = None


class RowStatus(Enum):
    """Use that a run makes of a data row: kept, skipped, or refused as bad."""

    KEPT = "kept"
    TOO_LONG = "too long"
    FILTERED = "filtered"
    BAD = "bad"


@dataclass(frozen=True)
class ClassifiedRow:
    """Row of a data file with its status, and its prompt or problem.

    index: row number in the file, from 0. num_tokens: prompt length, 0 without a rendered prompt.
    prompt: set if the row is used. problem: set if the row is bad.
    """

    status: RowStatus
    index: int
    num_tokens: int = 0
    prompt: Prompt | None = None
    problem: ConfigError | None = None


def iterate_records(table: IndexedTable) -> Iterator[tuple[str, int, Any]]:
    """Yield (location, index, record) of each row of a table in order."""
    for start in range(0, len(table), RENDER_BATCH_ROWS):
        yield from table.read_rows(range(start, min(start + RENDER_BATCH_ROWS, len(table))))


def load_data_rows(file: DataFile) -> Iterator[DataRow]:
    """Yield the rows of an entry in order. Raises ConfigError at the first bad row."""
    for location, index, record in iterate_records(open_table(file.path, file.split)):
        row = parse_record(record, location, index, file.row_keys)
        if isinstance(row, ConfigError):
            raise row
        yield row


class LazyTokenizer:
    """Tokenizer of a model directory, loaded on first use in each process."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._trusted_env = make_trusted_env(model) if is_trusted(model) else {}
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def __call__(self) -> "PreTrainedTokenizerBase":
        if self._tokenizer is None:
            os.environ.update({} if is_trusted(self._model) else self._trusted_env)
            self._tokenizer = load_tokenizer(self._model)
        return self._tokenizer

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_tokenizer": None}


class PromptFile:
    """Data file whose rows are turned into prompts on demand, in any order.

    first: uid index of the first row. make_renderer: of rows that give completions.
    """

    def __init__(
        self,
        file: DataFile,
        tokenizer: "Callable[[], PreTrainedTokenizerBase]",
        limits: PromptLimits,
        *,
        first: int = 0,
        make_renderer: MakeRenderer | None = None,
    ) -> None:
        self.file = file
        self.limits = limits
        self._make_renderer = make_renderer if file.gives != ROLLOUTS else None
        self._rendered: dict[int, RenderedRow | ConfigError] = {}
        recorded = os.path.join(file.path, RECORDED_FOLDER)
        self._is_recorded = self._make_renderer is not None and os.path.isdir(recorded)
        self.table = open_table(recorded if self._is_recorded else file.path, file.split)
        self.indices = first + self.table.get_indices()
        self._first_index = first
        self._tokenizer = tokenizer

    def make_prompts(self, indices: ArrayLike) -> list[ClassifiedRow]:
        """Turn the rows with these uid indices into prompts; a bad row has its problem.

        Raises DataError if rows are unreadable, and ConfigError for an unusable template or filter.
        """
        read = self.table.read_rows(np.searchsorted(self.indices, indices).tolist())
        keys = replace(self.file.row_keys, is_recorded=self._is_recorded)
        parsed = [parse_record(record, place, index, keys) for place, index, record in read]
        with _render_lock:
            template, keep = self._template_and_filter
            valid = [row for row in parsed if isinstance(row, DataRow)]
            rendered = iter(self._render(valid, template))
            return [
                ClassifiedRow(RowStatus.BAD, index, problem=row)
                if isinstance(row, ConfigError)
                else self._classify_row(row, next(rendered), keep)
                for (_, index, _), row in zip(read, parsed, strict=True)
            ]

    def read_numbers(self, column: str, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the numbers in a column, or key of extra_info, of the rows with these uid indices.

        Raises ConfigError for a row without a finite number there.
        """
        numbers = array("d")
        rows = np.searchsorted(self.indices, indices)
        for first in range(0, len(rows), RENDER_BATCH_ROWS):
            read = self.table.read_rows(rows[first : first + RENDER_BATCH_ROWS].tolist())
            for place, _, record in read:
                fields = record if isinstance(record, dict) else {}
                extra = fields.get("extra_info")
                value = fields.get(column, extra.get(column) if isinstance(extra, dict) else None)
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise ConfigError(
                        f"{place}: data.curriculum={column}: the column must be a finite number in"
                        f" every row, is {value!r}"
                    )
                numbers.append(value)
        return np.array(numbers)

    def _render(
        self, rows: Sequence[DataRow], template: ChatTemplate
    ) -> Sequence[RenderedRow | ConfigError]:
        """Render rows to the token ids of prompts, with the targets that they give."""
        if self._make_renderer is not None:
            if len(self._rendered) > MAX_RENDERED_ROWS:
                self._rendered.clear()
            for row in rows:
                if row.index not in self._rendered:
                    try:
                        self._rendered[row.index] = self._renderer.render_row(row)
                    except ConfigError as error:
                        self._rendered[row.index] = error
            return [self._rendered[row.index] for row in rows]
        prompts = _render_token_ids(self._tokenizer(), rows, template)
        return [ids if isinstance(ids, ConfigError) else (ids, ()) for ids in prompts]

    @cached_property
    def _renderer(self) -> RowRenderer:
        assert self._make_renderer is not None
        return self._make_renderer(self._tokenizer(), self._template_and_filter[0], self.file.gives)

    @cached_property
    def _template_and_filter(self) -> tuple[ChatTemplate, PromptFilter]:
        file = self.file
        keep = load_prompt_filter(file.filter, setting=f"{file.key}.filter")
        template = load_chat_template(
            file.template,
            self._tokenizer(),
            setting=f"{file.key}.template",
            arguments=file.template_arguments,
        )
        return template, keep

    def _classify_row(
        self, row: DataRow, rendered: RenderedRow | ConfigError, keep: PromptFilter
    ) -> ClassifiedRow:
        if isinstance(rendered, ConfigError):
            return ClassifiedRow(RowStatus.BAD, row.index, problem=rendered)
        prompt = make_prompt(row, *rendered, first=self._first_index)
        try:
            status = _choose_status(prompt, keep, self.limits)
            status = status if self._is_accepted(row) else RowStatus.FILTERED
        except ConfigError as problem:
            return ClassifiedRow(RowStatus.BAD, row.index, prompt.num_tokens, problem=problem)
        is_used = status is RowStatus.KEPT
        return ClassifiedRow(status, row.index, prompt.num_tokens, prompt if is_used else None)

    def _is_accepted(self, row: DataRow) -> bool:
        """Return whether a row has enough score and, as a recorded rollout, ended by itself."""
        finish, score = (row.extra_info.get(name) for name in ("finish_reason", "score"))
        if self._is_recorded and finish != "stop":
            return False
        if (least := self.file.min_score) is None:
            return True
        if not isinstance(score, int | float):
            raise ConfigError(
                f"{row.location}: {self.file.key}.min_score={least:g}: the column score must be a"
                f" number, is {'null or missing' if score is None else repr(score)}"
            )
        return score >= least

    def __iter__(self) -> Iterator[ClassifiedRow]:
        for start in range(0, len(self.table), RENDER_BATCH_ROWS):
            yield from self.make_prompts(self.indices[start : start + RENDER_BATCH_ROWS])

    @property
    def settings_text(self) -> str:
        """Text of all settings that prompts depend on, with hashes of template and filter file."""
        file = self.file
        facts: list[object] = [file.prompt_key, file.label_key, file.split, file.template]
        facts += [sorted(file.template_arguments.items()), self.limits.on_long]
        facts += [file.min_score, file.targets] if file.gives != ROLLOUTS else []
        paths = [] if file.template in (MODEL_TEMPLATE, PLAIN_TEMPLATE) else [file.template]
        paths += [file.filter.rpartition(":")[0]] if file.filter else []
        code = [_hash_file(path) for path in paths]
        return repr((facts, file.filter.rpartition(":")[2], code))

    def __getstate__(self) -> dict[str, object]:
        made = ("_template_and_filter", "_renderer")
        return {name: item for name, item in vars(self).items() if name not in made}


def _hash_file(path: str) -> str:
    with open_regular_file(path) as file:
        return hashlib.blake2b(file.read(MAX_LINE_BYTES), digest_size=8).hexdigest()


def _render_token_ids(
    tokenizer: "PreTrainedTokenizerBase", rows: Sequence[DataRow], template: ChatTemplate
) -> Sequence[list[int] | ConfigError]:
    """Render rows to token ids or ConfigErrors; after an error render each row alone."""
    try:
        return render_prompts(tokenizer, rows, template) if rows else []
    except ConfigError as error:
        if len(rows) == 1:
            return [error]
    return [item for row in rows for item in _render_token_ids(tokenizer, [row], template)]


def make_prompt(
    row: DataRow,
    token_ids: Sequence[int],
    targets: Sequence[tuple[bytes, bytes]] = (),
    *,
    first: int = 0,
) -> Prompt:
    return Prompt(
        uid=make_uid(0, first + row.index),
        token_ids=np.array(token_ids, np.int32),
        messages=row.messages,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        row_location=row.location,
        is_chat=row.is_chat,
        environment=row.environment,
        targets=targets,
    )


def _choose_status(prompt: Prompt, keep: PromptFilter, limits: PromptLimits) -> RowStatus:
    """Return the use of a rendered prompt. Raises ConfigError for a prompt that makes a bad row."""
    location, length = prompt.row_location, prompt.num_tokens
    if not len(prompt.token_ids):
        raise ConfigError(f"{location}: the prompt has no tokens")
    parts = [prompt.token_ids, *(np.frombuffer(ids, np.int32) for ids, _ in prompt.targets)]
    largest = max(int(part.max(initial=0)) for part in parts)
    if largest >= limits.vocab_size:
        raise ConfigError(
            f"{location}: the prompt has token id {largest}, but the model's vocabulary has"
            f" {limits.vocab_size} ids: tokenizer and model do not match"
        )
    if not keep(prompt, location):
        return RowStatus.FILTERED
    if limits.environments is not None:
        check_row_environment(prompt, limits.environments)
    if length <= limits.max_tokens:
        return RowStatus.KEPT
    if limits.on_long == "error":
        raise ConfigError(
            f"{location}: the prompt{' and its completion have' if prompt.targets else ' has'}"
            f" {length} tokens, the limit is {limits.max_tokens} "
            "(data.on_long_prompt=skip skips it)"
        )
    return RowStatus.TOO_LONG


def check_row_environment(prompt: Prompt, environments: Sequence[str]) -> None:
    """Raise ConfigError unless the row of a prompt names an environment exactly if it must.

    environments: names of the run's environments, as of `PromptLimits`.
    """
    if prompt.environment not in (environments or ("",)):
        names = ", ".join(filter(None, environments))
        rule = f"must be one of {names}" if names else "the run has none with a name"
        raise ConfigError(
            f"{prompt.row_location}: column environment={prompt.environment}: {rule}"
            " (environment.named)"
        )


def load_prompt_filter(reference: str, *, setting: str) -> PromptFilter:
    """Load the user's prompt filter, a function that returns whether to keep a prompt.

    reference: value of `setting`, file.py:function; an empty reference keeps all prompts. Raises
    ConfigError for a missing function. The filter raises ConfigError, with the prompt's location
    and the user's line, if the function fails or returns anything but a bool.
    """
    if not reference:
        return lambda prompt, location: True
    code = load_referenced_function(reference, setting=setting)
    code.check_not_async()

    def keep(prompt: Prompt, location: str) -> bool:
        try:
            kept = code.function(prompt)
        # SystemExit too: user code may call exit().
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{location}: filter: {code.describe_error(error)}") from error
        if not isinstance(kept, bool | np.bool_):
            raise ConfigError(
                f"{location}: filter: {code.name} in {code.file} returned {format_returned(kept)},"
                " not True or False"
            )
        return bool(kept)

    return keep


# Eager loading of small files, for evaluation.


@dataclass(frozen=True)
class LoadedFile:
    """Prompts of one file, with row counts by status.

    The index in a prompt's uid counts all rows, skipped ones too, from file to file: row 12 of the
    first file has index 11.
    """

    file: DataFile
    prompts: list[Prompt]
    status_counts: Mapping[RowStatus, int]

    @property
    def notes(self) -> list[str]:
        return describe_unused_rows(self.file, self.status_counts)


def describe_unused_rows(
    file: DataFile, counts: Mapping[RowStatus, int], suffix: str = ""
) -> list[str]:
    """Return a line per reason why rows were skipped: count, reason and `suffix`."""
    filters = file.filter or "score or end"
    reasons = {RowStatus.TOO_LONG: "too long", RowStatus.FILTERED: f"filtered by {filters}"}
    return [
        f"{file.path}: {counts[status]} prompts skipped, {reason}{suffix}"
        for status, reason in reasons.items()
        if counts[status]
    ]


def load_prompts(
    files: Sequence[DataFile],
    tokenizer: "PreTrainedTokenizerBase",
    limits: PromptLimits,
    *,
    max_prompts: int | None = None,
) -> list[LoadedFile]:
    """Load the first `max_prompts` prompts of each file in file order, rendered and checked.

    Raises a one-line ConfigError with file, row and rule for the first bad row, an unusable file,
    template or filter, or a file without any usable row.
    """
    loaded, first = [], 0
    for file in files:
        prompts, counts, index = [], Counter[RowStatus](), 0
        for row in PromptFile(file, lambda: tokenizer, limits, first=first):
            if row.problem is not None:
                raise row.problem
            counts[row.status] += 1
            index = row.index
            if row.prompt is not None:
                prompts.append(row.prompt)
            if len(prompts) == max_prompts:
                break
        if not prompts:
            raise make_no_prompt_error(file, counts, limits)
        loaded.append(LoadedFile(file, prompts, counts))
        first += index + 1
    return loaded


def make_no_prompt_error(
    file: DataFile, counts: Mapping[RowStatus, int], limits: PromptLimits
) -> ConfigError:
    reason = f"{counts[RowStatus.FILTERED]} filtered, {counts[RowStatus.TOO_LONG]} too long"
    return ConfigError(
        f"{file.path}: no usable prompt: {reason} (the limit is {limits.max_tokens} tokens)"
    )


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
    make_renderer: MakeRenderer | None = None,
) -> TrainingFiles:
    """Open training files, and classify every row of small ones and a sample of larger ones.

    In a sampled file prompts may exceed the longest sampled prompt by LENGTH_MARGIN, up to
    max_sampled_tokens; None allows as many as `limits`. inspect: receives the classified prompts.
    Raises a one-line ConfigError with file, row and rule for the first bad row among those
    classified, an unusable file, template or filter, or a file without any usable row.
    """
    opened, first = [], 0
    for file in files:
        opened.append(PromptFile(file, tokenizer, limits, first=first, make_renderer=make_renderer))
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
    for target in prompt.targets:
        digest.update(b"".join(target))
    columns = (prompt.messages, sorted(prompt.extra_info.items()))
    columns_digest.update(repr(columns).encode("utf-8", "backslashreplace"))
