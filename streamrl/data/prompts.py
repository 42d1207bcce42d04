"""Prompts of a few rows, read and rendered at once: those of an evaluation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """The prompts of one file, and how many rows had which fate.

    The uid of each is `make_uid(0, first + index)` with the row's index in the file, from 0: row 12
    of a parquet file or line 12 of a JSONL file has index 11, whatever was left out before it.
    """

    file: DataFile
    first_index: int
    prompts: list[Prompt]
    status_counts: Mapping[RowStatus, int]

    @property
    def notes(self) -> list[str]:
        """What was not used as it is in the file, for the user."""
        return describe_unused_rows(self.file, self.status_counts)


@dataclass(frozen=True)
class LoadedPrompts:
    """The prompts of all files. No two have the same index in their uid."""

    files: tuple[LoadedFile, ...]

    @cached_property
    def prompts(self) -> list[Prompt]:
        """All prompts, in the order of files and rows."""
        return [prompt for file in self.files for prompt in file.prompts]

    @property
    def prompts_by_name(self) -> dict[str, list[Prompt]]:
        """The prompts of each file by its name."""
        return {file.file.name: file.prompts for file in self.files}


def describe_unused_rows(
    file: DataFile, fates: Mapping[RowStatus, int], more: str = ""
) -> list[str]:
    """Say what was not used as it is in a file, with `more` behind each count."""
    said = {
        RowStatus.TOO_LONG: "skipped, too long",
        RowStatus.TRUNCATED: "truncated",
        RowStatus.FILTERED: f"left out by {file.filter}",
    }
    return [
        f"{file.path}: {fates[fate]} prompts {words}{more}"
        for fate, words in said.items()
        if fates[fate]
    ]


def load_prompt_files(
    files: Sequence[DataFile], model: str, *, limit: int, on_long: str, most: int | None = None
) -> LoadedPrompts:
    """Load prompts as the model of a directory reads them, of at most `limit` tokens each.

    Raises ConfigError, as `load_prompts` does.
    """
    limits = PromptLimits(limit, load_vocab_size(model), on_long)
    return load_prompts(files, load_tokenizer(model), limits, most=most)


def load_prompts(
    files: Sequence[DataFile],
    tokenizer: "PreTrainedTokenizerBase",
    limits: PromptLimits,
    *,
    most: int | None = None,
) -> LoadedPrompts:
    """Load prompts in file order, rendered and within the limits; of each file the first `most`.

    Raises ConfigError in one line naming file, row and rule: the problem of the first row that is
    bad, a file, template or filter that cannot be used, and a file of which no row is left.
    """
    loaded, first = [], 0
    for file in files:
        prompts, fates, index = [], Counter[RowStatus](), 0
        for row in PromptFile(file, lambda: tokenizer, limits, first=first):
            if row.problem is not None:
                raise row.problem
            fates[row.status] += 1
            index = row.index
            if row.prompt is not None:
                prompts.append(row.prompt)
            if len(prompts) == most:
                break
        if not prompts:
            raise make_no_prompt_error(file, fates, limits)
        loaded.append(LoadedFile(file, first, prompts, fates))
        first += index + 1
    return LoadedPrompts(tuple(loaded))


def make_no_prompt_error(
    file: DataFile, fates: Mapping[RowStatus, int], limits: PromptLimits
) -> ConfigError:
    """Say that a file gives no prompt, and why."""
    if fates[RowStatus.FILTERED]:
        why = f"{fates[RowStatus.FILTERED]} filtered, {fates[RowStatus.TOO_LONG]} too long"
    else:
        why = f"all {fates[RowStatus.TOO_LONG]} prompts are longer than {limits.max_tokens} tokens"
    return ConfigError(f"{file.path}: no prompt is left: {why}")
