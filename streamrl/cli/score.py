"""`streamrl score`: score existing completions with a run's rewards, without a model."""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamrl.cli.arguments.arg_types import parse_nonempty
from streamrl.cli.arguments.config_args import (
    ROW_OPTIONS,
    add_file_options,
    add_recipe_argument,
    read_file_options,
)
from streamrl.config.run_config import ConfigSections, load_sections
from streamrl.data.config import DataFile
from streamrl.data.indexed_table import open_table
from streamrl.data.prompt_file import iterate_records, load_data_rows, make_prompt
from streamrl.errors import ConfigError, RewardError, extend_errors
from streamrl.files.printable_text import format_quantity
from streamrl.files.python_module import split_reference
from streamrl.messages import Prompt, parse_uid
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.interface.reward import RewardContext
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_scorer import describe_completion
from streamrl.rewards.reward_set import COSTS, RewardSet
from streamrl.telemetry.progress import ProgressLine, show_progress
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.reward_result import RewardOutcome

EXIT_FAILED = 1
PASS, WRONG = RewardOutcome.PASS.value, RewardOutcome.WRONG.value
ScoreLine = dict[str, Any]
"""JSON line printed for a completion."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "streamrl score ROWS --completions FILE (--reward REWARD ... | --config CONFIG)"
        " [--jsonl] [key=value ...]"
    )
    parser.add_argument(
        "rows", type=parse_nonempty, metavar="ROWS", help="prompt file, as in data.train"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, e.g. scorer.timeout_s=5"
    )
    parser.add_argument(
        "--completions",
        type=parse_nonempty,
        required=True,
        metavar="FILE",
        help='JSONL of {"index": row number from 0, "completion": text}; lines with one index form'
        " a group; line 12 of a JSONL file has index 11, counting blank lines",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="REWARD",
        help="reward kind, file.py:function, or {kind: regex, pattern: x, weight: 0.5}; repeatable",
    )
    add_recipe_argument(parser, "the rewards to use")
    add_file_options(parser, ROW_OPTIONS)
    parser.add_argument(
        "--jsonl", action="store_true", help="print only the JSON lines, without a summary"
    )


def run(arguments: argparse.Namespace) -> int:
    """Return exit code 1 if a completion could not be scored, else 0."""
    with show_progress("reading config and completions") as progress:
        config = _load_score_config(arguments.config, arguments.reward, arguments.overrides)
        # A user's reward file may print while imported; keep that out of the JSON lines.
        with contextlib.redirect_stdout(sys.stderr):
            context = RewardContext(config.scorer, config.sandbox)
            reward_sets = [build_rewards(config.rewards, context)]
            if config.costs:
                reward_sets.append(build_rewards(config.costs, context, score_spec=COSTS))
            file = _choose_data_file(arguments, config)
            groups = read_completion_groups(file, arguments.completions)
        started = time.monotonic()
        lines = asyncio.run(_score_groups(reward_sets, groups, config, progress))
    if not arguments.jsonl:
        sources = {i: group.prompt.data_source for group in groups for i in group.line_indices}
        in_order = [sources[i] for i in range(len(lines))]
        killed = sum((Counter(s.drain_counts()) for s in reward_sets), Counter[str]())
        text = format_score_summary(lines, in_order, killed, time.monotonic() - started)
        print("\n".join(text), file=sys.stderr)
    return EXIT_FAILED if any(line["score"] is None for line in lines) else 0


def _choose_data_file(arguments: argparse.Namespace, config: ConfigSections) -> DataFile:
    """Return the named prompt file; options come from the command line, else the recipe."""
    files = {file.path: file for file in (*config.data.train_files, *config.data.eval_files)}
    named = files.get(arguments.rows) or files.get(str(Path(arguments.rows).absolute()))
    options = read_file_options(arguments, has_file=True)
    return replace(named or DataFile(arguments.rows), **options)


def _load_score_config(
    recipe: Path | None, rewards: Sequence[str], overrides: Sequence[str]
) -> ConfigSections:
    """Load the recipe, or default settings; `rewards` of --reward replace its rewards."""
    if recipe is None and not rewards:
        raise ConfigError("score: give --reward (see `streamrl config --rewards`) or --config")
    entries = ", ".join(_make_reward_entry(reward) for reward in rewards)
    named = [f"rewards=[{entries}]"] if rewards else []
    return load_sections(recipe, [*named, *overrides])


def _make_reward_entry(reward: str) -> str:
    """Convert a value of --reward (kind, file.py:function, mapping) to YAML of an entry."""
    if reward.lstrip().startswith("{"):
        return reward
    entry = {"kind": reward}
    if ":" in reward or reward.endswith(".py"):
        path, function = split_reference(reward, setting="--reward")
        entry = {"kind": "function", "name": function, "path": path, "function": function}
    return json.dumps(entry, ensure_ascii=False)


@dataclass(frozen=True)
class CompletionGroup:
    """A prompt row and its completions in the JSONL file of `streamrl score`, with line indices."""

    prompt: Prompt
    line_indices: Sequence[int]
    completions: Sequence[str]


class CompletionRecord(msgspec.Struct):
    """Line of a completion file: number of a prompt row, from 0, and a completion of it."""

    index: int
    completion: str


def read_completion_groups(file: DataFile, completions: str) -> list[CompletionGroup]:
    """Read a completion file and group its completions by prompt row, in order of first appearance.

    file: prompt file with the rows. completions: path of the JSONL completion file. Raises
    ConfigError, with file and line, for a malformed record or an index without a row.
    """
    with extend_errors("--completions "):
        records = list(_read_records(completions))
    wanted = {record.index for _, record in records}
    # Rewards read only the messages, so one dummy token will do.
    prompts = {
        row.index: make_prompt(row, [0]) for row in load_data_rows(file) if row.index in wanted
    }
    lines_by_index: defaultdict[int, list[int]] = defaultdict(list)
    for line, (where, record) in enumerate(records):
        if record.index not in prompts:
            raise ConfigError(
                f"--completions {where}: index={record.index}: {file.path} has no such row; rows"
                " count from 0"
            )
        lines_by_index[record.index].append(line)
    return [
        CompletionGroup(prompts[index], lines, [records[line][1].completion for line in lines])
        for index, lines in lines_by_index.items()
    ]


def _read_records(path: str) -> Iterator[tuple[str, CompletionRecord]]:
    """Yield each record of a completion file, with its location for errors."""
    for where, _, row in iterate_records(open_table(path, is_text=True)):
        if isinstance(row, ConfigError):
            raise row
        try:
            yield where, msgspec.convert(row, CompletionRecord)
        except msgspec.ValidationError:
            rule = 'must be {"index": number of a row, "completion": text}'
            raise ConfigError(f"{where}: {json.dumps(row)[:80]}: {rule}") from None


async def _score_groups(
    reward_sets: Sequence[RewardSet],
    groups: Sequence[CompletionGroup],
    config: ConfigSections,
    progress: ProgressLine,
) -> list[ScoreLine]:
    """Score all groups; print each line once all earlier lines of the file are known."""
    unprinted: dict[int, ScoreLine] = {}
    lines: list[ScoreLine] = []

    async def score_and_print(group: CompletionGroup) -> None:
        scored = await score_group(reward_sets, group, config.rewards)
        progress.advance(len(scored))
        unprinted.update(zip(group.line_indices, scored, strict=True))
        while len(lines) in unprinted:
            lines.append(unprinted.pop(len(lines)))
            progress.print_line(json.dumps(lines[-1]))

    try:
        for reward_set in reward_sets:
            for note in await reward_set.run_preflight():
                print(f"streamrl: {note}", file=sys.stderr)
            reward_set.check_prompts([group.prompt for group in groups])
            await reward_set.start()
        num_completions = sum(len(group.completions) for group in groups)
        progress.describe("scoring", num_completions, "completions")
        await map_concurrently(score_and_print, groups, most=config.scorer.max_groups)
    finally:
        for reward_set in reward_sets:
            await reward_set.close()
    return lines


async def score_group(
    reward_sets: Sequence[RewardSet], group: CompletionGroup, configs: Sequence[RewardConfig]
) -> Sequence[ScoreLine]:
    """Score the completions of one prompt row; return a JSON line for each completion.

    reward_sets: the rewards, then the costs if the run has any. configs: reward entries of the
    config. Field `seconds` is the time of the whole group, queueing included. If a reward fails,
    the lines have no score and name the error.
    """
    index, started = parse_uid(group.prompt.uid)[1], time.perf_counter()
    try:
        result, *costs = [
            await reward_set.judge_texts(group.prompt, group.completions)
            for reward_set in reward_sets
        ]
    except RewardError as error:
        line: ScoreLine = {"index": index, "score": None, "components": {}}
        line |= {"verdict": RewardOutcome.INFRA_ERROR.value, "verdicts": {}}
        line |= {"seconds": _measure_elapsed(started), "cause": error.cause, "error": str(error)}
        return [line] * len(group.completions)
    seconds = _measure_elapsed(started)
    lines = []
    for i, score in enumerate(result.totals.tolist()):
        record = describe_completion(result, i)
        verdict = combine_verdicts(record["verdicts"], configs)
        line = {"index": index, "score": score, "components": record["components"]}
        line |= {"verdict": verdict, "verdicts": record["verdicts"], "seconds": seconds}
        line |= {"numbers": record["numbers"]} if "numbers" in record else {}
        if costs:
            line |= {
                "cost": costs[0].totals[i].item(),
                "costs": describe_completion(costs[0], i)["components"],
            }
        details = {name: parts[i].detail for name, parts in result.components.items()}
        detail = "; ".join(f"{name}: {text}" for name, text in details.items() if text)
        lines.append(line | ({"detail": detail} if detail else {}))
    return lines


def _measure_elapsed(started: float) -> float:
    return round(time.perf_counter() - started, 6)


def combine_verdicts(verdicts: Mapping[str, str], configs: Sequence[RewardConfig]) -> str:
    """Combine the outcomes of a completion's reward components into one outcome.

    verdicts: outcome by component. An outcome other than pass and wrong (a timeout, a crash) wins.
    Otherwise the completion passes if every component with a weight or a gate passes, or, without
    such components, if all pass. Components that did not judge the completion are ignored.
    """
    judged = {
        name: outcome
        for name, outcome in verdicts.items()
        if outcome != RewardOutcome.NOT_JUDGED.value
    }
    unusual = [outcome for outcome in judged.values() if outcome not in (PASS, WRONG)]
    if unusual:
        return unusual[0]
    counts = {reward.component_name for reward in configs if reward.weight or reward.gate}
    counted = [outcome for name, outcome in judged.items() if name in counts]
    return PASS if all(outcome == PASS for outcome in counted or judged.values()) else WRONG


def format_score_summary(
    lines: Sequence[Mapping[str, Any]],
    sources: Sequence[str],
    counts: Mapping[str, int],
    seconds: float,
) -> list[str]:
    """Format mean scores, outcomes, times and failures of scored completions as lines of text.

    lines: JSON lines of the completions. sources: data source of each completion. counts:
    completions by outcome and killed processes by cause, from `RewardSet.drain_counts`. seconds:
    duration of the command.
    """
    verdicts = _format_counts(line["verdict"] for line in lines)
    title = f"{format_quantity(len(lines), 'completion')} in {seconds:.1f} s: {verdicts}"
    rows: dict[str, str] = {}
    columns: defaultdict[str, list[float | None]] = defaultdict(list)
    outcomes: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        for name, number in _list_numbers(line):
            columns[name].append(number)
        for name, verdict in line["verdicts"].items():
            outcomes[f"reward/{name}"].append(verdict)
    for name, column in columns.items():
        words = f": {_format_counts(outcomes[name])}" if name in outcomes else ""
        rows[name] = f"mean {_format_mean(column)}{words}"
    for source in dict.fromkeys(sources) if len(set(sources)) > 1 else ():
        subset = [line for line, name in zip(lines, sources, strict=True) if name == source]
        words = _format_counts(line["verdict"] for line in subset)
        mean = _format_mean(line["score"] for line in subset)
        rows[f"source {source or '(none)'}"] = f"mean {mean}: {words}"
    rows["seconds"] = _format_seconds(lines)
    kills = {cause: count for cause, count in counts.items() if cause.startswith("scorer/")}
    rows |= {cause: format_quantity(count, "time") for cause, count in kills.items()}
    if failed := [line for line in lines if line["score"] is None]:
        causes = _format_counts(line["cause"] for line in failed)
        rows["not scored"] = f"{causes}; first: {failed[0]['error']}"
    width = max(map(len, rows))
    return [title, *(f"{name:<{width}}  {text}" for name, text in rows.items())]


def _list_numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield name and value of each number of a scored completion; None where a reward abstains."""
    if line["score"] is None:
        return
    yield "score", line["score"]
    for name, score in line["components"].items():
        yield f"reward/{name}", score
        for key, number in line.get("numbers", {}).get(name, {}).items():
            yield f"reward/{name}/{key}", number
    if "cost" in line:
        yield "cost", line["cost"]
        yield from ((f"cost/{name}", cost) for name, cost in line["costs"].items())


def _format_seconds(lines: Sequence[Mapping[str, Any]]) -> str:
    """Format percentiles over groups; all completions of a group share the same time."""
    times = {line["index"]: line["seconds"] for line in lines}
    p50, p99 = np.percentile(list(times.values()), [50, 99])
    slowest = max(times, key=lambda index: times[index])
    return (
        f"per group, queueing included: p50 {p50:.3f}, p99 {p99:.3f};"
        f" slowest {times[slowest]:.3f}, index {slowest}"
    )


def _format_mean(values: Iterable[float | None]) -> str:
    items = [value for value in values if value is not None]
    return f"{statistics.fmean(items):.4f}" if items else "none"


def _format_counts(words: Iterable[str]) -> str:
    """Format the number of occurrences of each word, most frequent word first."""
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())
