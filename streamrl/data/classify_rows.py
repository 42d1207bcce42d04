"""Row classification: turns each row of a data file into a prompt, or the reason to skip it."""

import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from streamrl.data.chat_template import ChatTemplate, load_chat_template, render_prompts
from streamrl.data.files import DataFile
from streamrl.data.reading.rows import BadRow, DataRow
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.messages import Prompt, make_uid
from streamrl.user_code.python_module import load_referenced_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptFilter = Callable[[Prompt, str], bool]
"""Takes a prompt and its location for errors; returns whether to keep the prompt."""
RENDER_BATCH_ROWS = 512
"""Rows per tokenizer call."""


@dataclass(frozen=True)
class PromptLimits:
    """Limits of a prompt: length in tokens, size of the vocabulary, action on a longer prompt.

    on_long: "error", "skip" or "truncate". environments: names of the run's environments, ("",) for
    a single one without a name, () for a run without any; None accepts all names.
    """

    max_tokens: int
    vocab_size: int
    on_long: str = "error"
    environments: tuple[str, ...] | None = None


class RowStatus(Enum):
    """Use that a run makes of a data row: kept, truncated, skipped, or refused as bad."""

    KEPT = "kept"
    TRUNCATED = "truncated"
    TOO_LONG = "too long"
    FILTERED = "filtered"
    BAD = "bad"


@dataclass(frozen=True)
class ClassifiedRow:
    """Row of a data file with its status, and its prompt or problem.

    index: row number in the file, from 0. num_tokens: prompt length before truncation, 0 without a
    rendered prompt. prompt: set if the row is used. problem: set if the row is bad.
    """

    status: RowStatus
    index: int
    num_tokens: int = 0
    prompt: Prompt | None = None
    problem: ConfigError | None = None


class RowClassifier:
    """Converter of data rows to prompts, in batches; returns bad rows instead of raising.

    first: added to a row's index to make its uid, `make_uid(0, first + index)`. The constructor
    raises ConfigError for an unusable template or filter.
    """

    def __init__(
        self,
        file: DataFile,
        tokenizer: "PreTrainedTokenizerBase",
        limits: PromptLimits,
        *,
        first: int = 0,
    ) -> None:
        self._prompt_filter = load_prompt_filter(file.filter, setting=f"{file.key}.filter")
        self._template = load_chat_template(
            file.template,
            tokenizer,
            setting=f"{file.key}.template",
            arguments=file.template_arguments,
        )
        self._tokenizer = tokenizer
        self._limits = limits
        self._first_index = first

    def classify_rows(self, rows: Sequence[DataRow | BadRow]) -> Iterator[ClassifiedRow]:
        valid = [row for row in rows if isinstance(row, DataRow)]
        rendered = iter(_render_token_ids(self._tokenizer, valid, self._template))
        for row in rows:
            if isinstance(row, BadRow):
                yield ClassifiedRow(RowStatus.BAD, row.index, problem=row.problem)
            elif isinstance(token_ids := next(rendered), ConfigError):
                yield ClassifiedRow(RowStatus.BAD, row.index, problem=token_ids)
            else:
                prompt = make_prompt(row, token_ids, first=self._first_index)
                yield _classify_prompt(row, prompt, self._prompt_filter, self._limits)


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


def make_prompt(row: DataRow, token_ids: Sequence[int], *, first: int = 0) -> Prompt:
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
    )


def _classify_prompt(
    row: DataRow, prompt: Prompt, keep: PromptFilter, limits: PromptLimits
) -> ClassifiedRow:
    length = len(prompt.token_ids)
    try:
        _check_token_ids(row, prompt, limits.vocab_size)
        if not keep(prompt, row.location):
            return ClassifiedRow(RowStatus.FILTERED, row.index, length)
        if limits.environments is not None:
            check_row_environment(prompt, limits.environments)
        if length <= limits.max_tokens:
            return ClassifiedRow(RowStatus.KEPT, row.index, length, prompt)
        if limits.on_long == "truncate":
            cut = replace(prompt, token_ids=prompt.token_ids[-limits.max_tokens :])
            return ClassifiedRow(RowStatus.TRUNCATED, row.index, length, cut)
        if limits.on_long == "skip":
            return ClassifiedRow(RowStatus.TOO_LONG, row.index, length)
        raise ConfigError(
            f"{row.location}: the prompt has {length} tokens, the limit is {limits.max_tokens} "
            "(data.on_long_prompt=skip or truncate accepts it)"
        )
    except ConfigError as problem:
        return ClassifiedRow(RowStatus.BAD, row.index, length, problem=problem)


def _check_token_ids(row: DataRow, prompt: Prompt, vocab_size: int) -> None:
    if not prompt.token_ids.size:
        raise ConfigError(f"{row.location}: the prompt has no tokens")
    largest = int(prompt.token_ids.max())
    if largest >= vocab_size:
        raise ConfigError(
            f"{row.location}: the prompt has token id {largest}, but the model's vocabulary has "
            f"{vocab_size} ids: tokenizer and model do not match"
        )


def check_row_environment(prompt: Prompt, environments: Sequence[str]) -> None:
    """Raise ConfigError unless the row of a prompt names an environment exactly if it must.

    environments: names of the run's environments, as of `PromptLimits`.
    """
    name = prompt.environment
    if name in (environments or ("",)):
        return
    if not name:
        raise ConfigError(
            f"{prompt.row_location}: names no environment; its column 'environment' must be one of"
            f" {', '.join(environments)}"
        )
    label = f"{prompt.row_location}: environment={name}"
    if not environments:
        raise ConfigError(
            f"{label}: no environment is set; set environment.named.{name}, or remove the column"
        )
    if not any(environments):
        raise ConfigError(
            f"{label}: the only environment has no name; move its settings from environment to"
            f" environment.named.{name}, or remove the column"
        )
    hint = suggest_nearest(name, environments, noun="environment")
    raise ConfigError(f"{label}: no such environment in environment.named; {hint}")


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
            returned = " ".join(reprlib.repr(kept).split())
            raise ConfigError(
                f"{location}: filter: {code.name} in {code.file} returned {returned},"
                " not True or False"
            )
        return bool(kept)

    return keep
