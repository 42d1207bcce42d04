"""`streamrl data check`: what a file of prompts holds, and what a run would do with each row."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.config import RunConfig, load_config
from streamrl.data import (
    DataConfig,
    DataFile,
    PromptLimits,
    RowStatus,
    load_tokenizer,
    load_vocab_size,
)
from streamrl.data.files import MODEL_TEMPLATE, PLAIN_TEMPLATE
from streamrl.data.validate import FileReport, validate_file
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXIT_BAD_ROWS = 2
MAX_SHOWN_ROWS = 20
"""Bad rows that are named in the report, of each file; --json names them all, to a bound."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl data`."""
    parser.usage = "streamrl data check [FILE ...] --model M | --config RECIPE"
    parser.add_argument("action", choices=["check"], help="check: read every row, as a run would")
    parser.add_argument(
        "files", nargs="*", type=parse_nonempty, metavar="FILE", help="default: those of the recipe"
    )
    parser.add_argument("--model", type=parse_path, help="model directory, for its tokenizer")
    parser.add_argument(
        "--config", type=parse_path, help="take model, files and limits of this recipe"
    )
    add_file_arguments(parser)
    parser.add_argument(
        "--max-prompt-tokens", type=int, help="longest prompt (what the model takes)"
    )
    parser.add_argument("--on-long-prompt", help="error, skip or truncate (the recipe's; error)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say how the files of the command line are read."""
    parser.add_argument("--prompt-key", help="column of the prompt (the recipe's; prompt)")
    parser.add_argument("--label-key", help="column of the ground truth")
    parser.add_argument(
        "--template", help=f"{MODEL_TEMPLATE}, {PLAIN_TEMPLATE} or a jinja file ({MODEL_TEMPLATE})"
    )
    parser.add_argument("--filter", help="file.py:function that says which prompts are kept")
    parser.add_argument("--split", help="split of a dataset that has several")


def parse_named_files(
    arguments: argparse.Namespace, paths: Sequence[str], data: DataConfig
) -> tuple[DataFile, ...]:
    """The files of the command line, read as its arguments say, else as `data` does."""
    names = ("prompt_key", "label_key", "template", "filter", "split")
    said = {name: vars(arguments)[name] for name in names if vars(arguments)[name] is not None}
    if said and not paths:
        name, value = next(iter(said.items()))
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag}={value}: says how files are read, but none is named")
    entries = [{"path": path, **said} for path in paths]
    return data.parse_files(entries, key="FILE")


def run(arguments: argparse.Namespace) -> int:
    """Check the files: 0 if a run could use every row, 2 if not."""
    recipe = load_config(arguments.config) if arguments.config else None
    data = recipe.data if recipe else DataConfig()
    files = parse_named_files(arguments, arguments.files, data) or (
        *data.train_files,
        *data.eval_files,
    )
    if not files:
        raise ConfigError("data check: name a file, or a --config whose files are to be checked")
    model = arguments.model or (recipe and recipe.model.path)
    if model is None:
        raise ConfigError("data check: --model or --config says whose tokens are counted")
    limits = _make_limits(arguments, recipe, str(model))
    tokenizer = load_tokenizer(str(model))
    reports = [_validate_file(file, tokenizer, limits) for file in files]
    if arguments.json:
        facts = {"model": str(model), "max_prompt_tokens": limits.max_tokens}
        print(json.dumps({**facts, "files": [report.to_dict() for report in reports]}))
    else:
        print("\n\n".join("\n".join(describe_file(report, limits)) for report in reports))
    return EXIT_BAD_ROWS if any(report.num_bad for report in reports) else 0


def _validate_file(
    file: DataFile, tokenizer: "PreTrainedTokenizerBase", limits: PromptLimits
) -> FileReport:
    """Check a file, with a progress bar where somebody looks on."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        # Escaped: what looks like markup is part of a name.
        name = escape(Path(file.path).name)
        track = partial(progress.track, description=f"reading {name}")
        return validate_file(file, tokenizer, limits, track=track)


def _make_limits(
    arguments: argparse.Namespace, recipe: RunConfig | None, model: str
) -> PromptLimits:
    """Those of the command line, else of the recipe, else all but one token of the model's."""
    names = ("on_long_prompt", "max_prompt_tokens")
    said = {name: vars(arguments)[name] for name in names if vars(arguments)[name] is not None}
    data = replace(recipe.data if recipe else DataConfig(), **said)
    most = data.compute_prompt_limit(
        model_tokens=read_model_length(model, limit=recipe.model.max_length if recipe else None),
        max_new_tokens=recipe.generator.max_new_tokens if recipe else 1,
    )
    return PromptLimits(most, load_vocab_size(model), data.on_long_prompt)


def describe_file(report: FileReport, limits: PromptLimits) -> list[str]:
    """The lines of a report."""
    used = report.status_counts[RowStatus.KEPT] + report.status_counts[RowStatus.TRUNCATED]
    lines = [f"{report.path}: {report.num_rows} rows, of which a run uses {used}"]
    facts: dict[str, Any] = {
        "sources": ", ".join(f"{name or '(none)'} {n}" for name, n in report.sources.items()),
        "prompts": report.lengths and report.lengths.to_text(limits.max_tokens),
        "skipped": report.status_counts[RowStatus.TOO_LONG]
        and f"{report.status_counts[RowStatus.TOO_LONG]} too long",
        "truncated": report.status_counts[RowStatus.TRUNCATED],
        "filtered": report.status_counts[RowStatus.FILTERED],
        "no ground truth": report.num_without_ground_truth,
        "duplicates": report.num_duplicates,
        "bad rows": report.num_bad,
    }
    lines += [f"  {name:<16} {value}" for name, value in facts.items() if value]
    lines += [f"    {problem.text}" for problem in report.problems[:MAX_SHOWN_ROWS]]
    if report.num_bad > MAX_SHOWN_ROWS:
        lines.append(f"    and {report.num_bad - MAX_SHOWN_ROWS} more")
    return lines
