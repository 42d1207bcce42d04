"""Validation of a data file for `streamrl data check`: reads every row and collects problems."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from streamrl.data.classify_rows import ClassifiedRow, PromptLimits, RowStatus
from streamrl.data.files import DataFile
from streamrl.data.prompt_file import PromptFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_KEPT_PROBLEMS = 1000
"""Bad rows per file whose messages are kept; further rows are only counted."""


@dataclass(frozen=True)
class PromptLengths:
    """Distribution of the prompt lengths in a file, in tokens."""

    min: int
    median: int
    p95: int
    max: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "PromptLengths":
        """Summarize at least one prompt length; median and p95 are lengths found in the data."""
        low, median, p95, high = np.quantile(lengths, [0, 0.5, 0.95, 1], method="nearest").tolist()
        return cls(low, median, p95, high)

    def to_text(self, limit: int) -> str:
        return (
            f"{self.min} to {self.max} tokens, median {self.median}, 95 % up to {self.p95}"
            f" (limit {limit})"
        )


@dataclass(frozen=True)
class RowProblem:
    """Error message about a bad row; `row` counts from 1."""

    row: int
    text: str


@dataclass
class FileReport:
    """Result of validating a data file: counts over its rows, and problems of bad rows.

    status_counts: rows by status in a run. lengths: prompts before truncation, without bad rows.
    Other counts cover usable prompts; a duplicate has the tokens of an earlier prompt.
    """

    path: str
    status_counts: Counter[RowStatus] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    lengths: PromptLengths | None = None
    num_without_ground_truth: int = 0
    num_duplicates: int = 0
    problems: list[RowProblem] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.status_counts.total()

    @property
    def num_bad(self) -> int:
        """Number of bad rows, which keep a run from starting."""
        return self.status_counts[RowStatus.BAD]

    def to_dict(self) -> dict[str, Any]:
        counts = {
            status.value.replace(" ", "_"): self.status_counts[status] for status in RowStatus
        }
        rest = {name: value for name, value in asdict(self).items() if name != "status_counts"}
        return {**rest, "rows": self.num_rows, **counts, "sources": dict(self.sources)}


def validate_file(
    file: DataFile,
    tokenizer: "PreTrainedTokenizerBase",
    limits: PromptLimits,
    *,
    track: Callable[[Iterable[ClassifiedRow], int], Iterable[ClassifiedRow]] = lambda rows, total: (
        rows
    ),
) -> FileReport:
    """Read and check every row of a data file as a run would; collect problems of bad rows.

    `track` wraps the iterator over rows, for a progress bar; its second argument is the number of
    rows. Raises ConfigError for an unusable file, template or filter.
    """
    report, lengths, seen = FileReport(file.path), array("i"), set[bytes]()
    prompts = PromptFile(file, lambda: tokenizer, limits)
    for row in track(prompts, len(prompts.table)):
        _add_row(report, row, seen)
        if row.problem is None:
            lengths.append(row.num_tokens)
    report.lengths = PromptLengths.from_lengths(lengths) if lengths else None
    return report


def _add_row(report: FileReport, row: ClassifiedRow, seen: set[bytes]) -> None:
    report.status_counts[row.status] += 1
    if row.problem is not None and len(report.problems) < MAX_KEPT_PROBLEMS:
        report.problems.append(RowProblem(row.index + 1, str(row.problem)))
    if row.prompt is not None:
        report.sources[row.prompt.data_source] += 1
        report.num_without_ground_truth += row.prompt.ground_truth is None
        tokens = xxhash.xxh3_128_digest(row.prompt.token_ids.tobytes())
        report.num_duplicates += tokens in seen
        seen.add(tokens)
