"""Eager loading of small prompt files, for evaluation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.data.chat_template import load_tokenizer, load_vocab_size
from streamrl.data.classify_rows import PromptLimits, RowStatus
from streamrl.data.files import DataFile
from streamrl.data.prompt_file import PromptFile
from streamrl.errors import ConfigError
from streamrl.messages import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Return a line per reason why rows were skipped or truncated: count, reason and `suffix`."""
    texts = {
        RowStatus.TOO_LONG: "skipped, too long",
        RowStatus.TRUNCATED: "truncated",
        RowStatus.FILTERED: f"filtered by {file.filter}",
    }
    return [
        f"{file.path}: {counts[status]} prompts {text}{suffix}"
        for status, text in texts.items()
        if counts[status]
    ]


def load_prompt_files(
    files: Sequence[DataFile],
    model: str,
    *,
    limit: int,
    on_long: str,
    environments: tuple[str, ...] | None = None,
    max_prompts: int | None = None,
) -> list[LoadedFile]:
    """Load the prompts of small files, with the tokenizer of a model directory.

    limit: maximum tokens of a prompt. on_long: action on a longer prompt: error, skip or truncate.
    environments: names that rows may give, as of PromptLimits. max_prompts: prompts per file.
    Raises a one-line ConfigError for a bad row or an unusable file.
    """
    limits = PromptLimits(limit, load_vocab_size(model), on_long, environments)
    return load_prompts(files, load_tokenizer(model), limits, max_prompts=max_prompts)


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
    if counts[RowStatus.FILTERED]:
        reason = f"{counts[RowStatus.FILTERED]} filtered, {counts[RowStatus.TOO_LONG]} too long"
    else:
        reason = f"all {counts[RowStatus.TOO_LONG]} prompts exceed {limits.max_tokens} tokens"
    return ConfigError(f"{file.path}: no usable prompt: {reason}")
