"""`streamrl score`: score existing completions with a run's rewards, without a model."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.arguments.completion_files import CompletionGroup, read_completion_groups
from streamrl.cli.arguments.config_args import read_config
from streamrl.cli.output.score_summary import format_score_summary
from streamrl.config.run_config import RunConfig, build_config
from streamrl.data.files import DataFile
from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import split_reference
from streamrl.messages import parse_uid
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.interface.reward import RewardContext
from streamrl.rewards.interface.reward_result import RewardOutcome
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_scorer import describe_completion
from streamrl.rewards.reward_set import COSTS, RewardSet
from streamrl.telemetry.progress_line import ProgressLine, show_progress

EXIT_FAILED = 1
PASS, WRONG, INFRA_ERROR = (
    outcome.value
    for outcome in (RewardOutcome.PASS, RewardOutcome.WRONG, RewardOutcome.INFRA_ERROR)
)
NOT_JUDGED = RewardOutcome.NOT_JUDGED.value
ScoreLine = dict[str, Any]
"""JSON line printed for a completion."""
GroupT = TypeVar("GroupT")


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
    parser.add_argument(
        "--config",
        type=parse_path,
        metavar="CONFIG",
        help="YAML file or run directory with the rewards to use",
    )
    parser.add_argument(
        "--prompt-key", metavar="COLUMN", help="prompt column (default: the config's, or prompt)"
    )
    parser.add_argument("--label-key", metavar="COLUMN", help="ground truth column")
    parser.add_argument("--split", metavar="NAME", help="split to read from a dataset with several")
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


def _choose_data_file(arguments: argparse.Namespace, config: RunConfig) -> DataFile:
    """Return the named prompt file; options come from the command line, else the recipe."""
    files = {file.path: file for file in (*config.data.train_files, *config.data.eval_files)}
    default = DataFile(arguments.rows, prompt_key=config.data.prompt_key)
    names = ("prompt_key", "label_key", "split")
    options = {name: vars(arguments)[name] for name in names if vars(arguments)[name] is not None}
    # Rows without a file are named as they are in messages: reasoning_gym:chain_sum.
    named = files.get(arguments.rows) or files.get(str(Path(arguments.rows).absolute()), default)
    return replace(named, **options)


def _load_score_config(
    recipe: Path | None, rewards: Sequence[str], overrides: Sequence[str]
) -> RunConfig:
    """Load the recipe, or default settings; `rewards` of --reward replace its rewards."""
    entries = ", ".join(_make_reward_entry(reward) for reward in rewards)
    # A recipe's scorer.combine refers to its own components.
    named = [f"rewards=[{entries}]", "scorer.combine=''"] if rewards else []
    changes = [*named, *overrides]
    if recipe is not None:
        return read_config(recipe, changes)
    if not rewards:
        raise ConfigError("score: give --reward (see `streamrl rewards`) or --config")
    # RunConfig requires these two keys; scoring reads neither.
    placeholders = OmegaConf.create({"model": {"path": "."}, "data": {"train": "."}})
    return build_config(placeholders, changes, source="score")


def _make_reward_entry(reward: str) -> str:
    """Convert a value of --reward (kind, file.py:function, mapping) to YAML of an entry."""
    if reward.lstrip().startswith("{"):
        return reward
    entry = {"kind": reward}
    if ":" in reward or reward.endswith(".py"):
        path, function = split_reference(reward, setting="--reward")
        entry = {"kind": "function", "name": function, "path": path, "function": function}
    return json.dumps(entry, ensure_ascii=False)


async def _score_groups(
    reward_sets: Sequence[RewardSet],
    groups: Sequence[CompletionGroup],
    config: RunConfig,
    progress: ProgressLine,
) -> list[ScoreLine]:
    """Score all groups; print each line once all earlier lines of the file are known."""
    unprinted: dict[int, ScoreLine] = {}
    lines: list[ScoreLine] = []

    def print_scored(group: CompletionGroup, scored: Sequence[ScoreLine]) -> None:
        progress.advance(len(scored))
        unprinted.update(zip(group.line_indices, scored, strict=True))
        while len(lines) in unprinted:
            lines.append(unprinted.pop(len(lines)))
            progress.print_line(json.dumps(lines[-1]))

    async def judge(group: CompletionGroup) -> tuple[CompletionGroup, Sequence[ScoreLine]]:
        return group, await score_group(reward_sets, group, config.rewards)

    try:
        for reward_set in reward_sets:
            for note in await reward_set.run_preflight():
                print(f"streamrl: {note}", file=sys.stderr)
            reward_set.check_prompts([group.prompt for group in groups])
            await reward_set.start()
        num_completions = sum(len(group.completions) for group in groups)
        progress.describe("scoring", num_completions, "completions")
        await score_concurrently(
            judge, groups, max_concurrent=config.scorer.max_groups, on_scored=print_scored
        )
    finally:
        for reward_set in reward_sets:
            await reward_set.close()
    return lines


async def score_concurrently(
    judge: Callable[[GroupT], Any],
    groups: Sequence[GroupT],
    *,
    max_concurrent: int,
    on_scored: Callable[..., None],
) -> None:
    """Score at most `max_concurrent` groups at a time.

    judge: coroutine function that scores a group. on_scored: receives the unpacked result of
    `judge`. Rewards enforce their own timeouts.
    """
    remaining, pending = iter(groups), set[asyncio.Task[Any]]()
    try:
        while True:
            batch = islice(remaining, max_concurrent - len(pending))
            pending |= {asyncio.create_task(judge(group)) for group in batch}
            if not pending:
                return
            finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                on_scored(*task.result())
    finally:
        for task in pending:
            task.cancel()


async def score_group(
    reward_sets: Sequence[RewardSet], group: CompletionGroup, configs: Sequence[RewardConfig]
) -> Sequence[ScoreLine]:
    """Score the completions of one prompt row; return a JSON line for each completion.

    reward_sets: the rewards, then the costs if the run has any. configs: reward entries of the
    config. Field `seconds` is the time of the whole group, queueing
    included. If a reward fails, the lines have no score and name the error.
    """
    index, started = parse_uid(group.prompt.uid)[1], time.perf_counter()
    try:
        result, *costs = [
            await reward_set.judge_texts(group.prompt, group.completions)
            for reward_set in reward_sets
        ]
    except RewardError as error:
        line = {
            "index": index,
            "score": None,
            "components": {},
            "verdict": INFRA_ERROR,
            "verdicts": {},
        }
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
    judged = {name: outcome for name, outcome in verdicts.items() if outcome != NOT_JUDGED}
    unusual = [outcome for outcome in judged.values() if outcome not in (PASS, WRONG)]
    if unusual:
        return unusual[0]
    counts = {reward.component_name for reward in configs if reward.weight or reward.gate}

    counted = [outcome for name, outcome in judged.items() if name in counts]
    return PASS if all(outcome == PASS for outcome in counted or judged.values()) else WRONG
