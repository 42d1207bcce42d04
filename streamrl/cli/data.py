"""`streamrl data check`: validate prompt files and report the status of their rows."""

import argparse
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from streamrl.algorithms.config import AlgorithmConfig
from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.arguments.config_args import (
    add_file_options,
    add_recipe_argument,
    read_file_options,
)
from streamrl.config.run_config import load_sections
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.config import DataConfig, DataFile
from streamrl.data.prompt_file import ClassifiedRow, PromptFile, PromptLimits, RowStatus
from streamrl.environments.rendering.target_renderer import TargetRenderer
from streamrl.errors import ConfigError
from streamrl.files.printable_text import format_quantity
from streamrl.messages import ROLLOUTS
from streamrl.telemetry.progress import ProgressLine, show_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_KEPT_PROBLEMS = 1000
"""Bad rows per file whose messages are kept; further rows are only counted."""
LENGTH_QUANTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}


@dataclass
class FileReport:
    """Result of validating a data file: counts over its rows, and problems of bad rows.

    status_counts: rows by status in a run. lengths: LENGTH_QUANTILES of the prompts
    without bad rows. problems: errors of at most MAX_KEPT_PROBLEMS bad rows. Other
    counts cover usable prompts; a duplicate has the tokens of an earlier prompt.
    """

    path: str
    status_counts: Counter[RowStatus] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, int] = field(default_factory=dict)
    num_without_ground_truth: int = 0
    num_duplicates: int = 0
    problems: list[str] = field(default_factory=list)

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
    prompts = PromptFile(file, lambda: tokenizer, limits, make_renderer=TargetRenderer)
    for row in track(prompts, len(prompts.table)):
        _add_row(report, row, seen)
        if row.problem is None:
            lengths.append(row.num_tokens)
    if lengths:
        quantiles = np.quantile(lengths, list(LENGTH_QUANTILES.values()), method="nearest")
        report.lengths = dict(zip(LENGTH_QUANTILES, quantiles.tolist(), strict=True))
    return report


def _add_row(report: FileReport, row: ClassifiedRow, seen: set[bytes]) -> None:
    report.status_counts[row.status] += 1
    if row.problem is not None and len(report.problems) < MAX_KEPT_PROBLEMS:
        report.problems.append(str(row.problem))
    if row.prompt is not None:
        report.sources[row.prompt.data_source] += 1
        report.num_without_ground_truth += row.prompt.ground_truth is None
        tokens = xxhash.xxh3_128_digest(row.prompt.token_ids.tobytes())
        report.num_duplicates += tokens in seen
        seen.add(tokens)


EXIT_BAD_ROWS = 2
MAX_SHOWN_ROWS = 20  # per file; --json lists more, up to a bound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl data check [FILE ...] (--model DIR | --config CONFIG) [options]"
    parser.add_argument("action", choices=["check"], help="check: read every row as a run would")
    parser.add_argument(
        "files",
        nargs="*",
        default=[],
        type=parse_nonempty,
        metavar="FILE",
        help="prompt file (default: the config's)",
    )
    parser.add_argument(
        "--model", type=parse_path, metavar="DIR", help="model directory with the tokenizer"
    )
    add_recipe_argument(parser, "the model, files and limits to use")
    add_file_options(parser)
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        help="algorithm to train, such as sft, whose rows need completions (default: the config's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def parse_named_files(
    arguments: argparse.Namespace, paths: Sequence[str], data: DataConfig
) -> tuple[DataFile, ...]:
    """Return the prompt files at `paths`, with the reading options of the command line.

    data: config section with default options. Raises ConfigError for an option without a file.
    """
    options = read_file_options(arguments, has_file=bool(paths))
    entries = [{"path": path, **options} for path in paths]
    return data.parse_files(entries, key="FILE")


def run(arguments: argparse.Namespace) -> int:
    """Return exit code 0 if no row would stop a run, else 2."""
    with show_progress("loading the tokenizer") as progress:
        model, limits, reports = _validate_files(arguments, progress)
    if arguments.json:
        facts = {"model": model, "max_prompt_tokens": limits.max_tokens}
        print(json.dumps({**facts, "files": [report.to_dict() for report in reports]}))
    else:
        print("\n\n".join("\n".join(describe_file(report, limits)) for report in reports))
    return EXIT_BAD_ROWS if any(report.num_bad for report in reports) else 0


def _validate_files(
    arguments: argparse.Namespace, progress: ProgressLine
) -> tuple[str, PromptLimits, list[FileReport]]:
    """Check the files of the command line; return the model and the limits that hold, too."""
    recipe = load_sections(arguments.config)
    if arguments.algorithm:
        recipe.algorithm = AlgorithmConfig(arguments.algorithm)
    gives = recipe.algorithm.spec.trains_on
    files = parse_named_files(arguments, arguments.files, recipe.data) or (
        *recipe.data.train_files,
        *(recipe.data.eval_files if gives == ROLLOUTS else ()),
    )
    if not files:
        raise ConfigError("data check: name a file, or a --config with data.train or data.eval")
    model = arguments.model or recipe.model.path
    if not model:
        raise ConfigError(
            "data check: give --model, or a --config with model.path; its tokenizer counts tokens"
        )
    if arguments.config is None or gives != ROLLOUTS:
        # A prompt may be one token shorter than the context, and name any environment.
        recipe.generator.max_new_tokens = 1
    limits = recipe.make_prompt_limits(str(model), most_tokens=recipe.model.max_length)
    if arguments.config is None or gives != ROLLOUTS:
        limits = replace(limits, environments=None)
    tokenizer, reports = load_tokenizer(str(model)), []
    for file in (replace(file, gives=gives) for file in files):
        progress.describe(f"checking {Path(file.path).name}", unit="rows")
        reports.append(validate_file(file, tokenizer, limits, track=progress.track))
    return str(model), limits, reports


def describe_file(report: FileReport, limits: PromptLimits) -> list[str]:
    """Format the report on a prompt file: rows by status, prompt lengths, messages on bad rows."""
    used = report.status_counts[RowStatus.KEPT]
    rows = format_quantity(report.num_rows, "row")
    lines = [f"{report.path}: {rows}, {used} of them usable"]
    facts: dict[str, Any] = {
        "sources": ", ".join(f"{name or '(none)'} {n}" for name, n in report.sources.items()),
        "prompts": report.lengths
        and "{min} to {max} tokens, median {median}, 95 % up to {p95}".format_map(report.lengths)
        + f" (limit {limits.max_tokens})",
        "skipped": report.status_counts[RowStatus.TOO_LONG]
        and f"{report.status_counts[RowStatus.TOO_LONG]} too long",
        "filtered": report.status_counts[RowStatus.FILTERED],
        "no ground truth": report.num_without_ground_truth,
        "duplicates": report.num_duplicates,
        "bad rows": report.num_bad,
    }
    lines += [f"  {name:<16} {value}" for name, value in facts.items() if value]
    lines += [f"    {problem}" for problem in report.problems[:MAX_SHOWN_ROWS]]
    if report.num_bad > MAX_SHOWN_ROWS:
        lines.append(f"    and {report.num_bad - MAX_SHOWN_ROWS} more")
    return lines
