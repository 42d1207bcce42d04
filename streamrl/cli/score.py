"""`streamrl score`: judge completions that are there already, as a run would, without a model."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.arguments.completion_files import CompletionGroup, read_completion_groups
from streamrl.cli.output.score_summary import summarize_scores
from streamrl.config import RunConfig, build_config, load_config
from streamrl.data import DataFile
from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import split_reference
from streamrl.messages import parse_uid
from streamrl.rewards import (
    COSTS,
    RewardConfig,
    RewardContext,
    RewardOutcome,
    RewardSet,
    build_rewards,
)
from streamrl.rewards.scorer import describe_completion

EXIT_FAILED = 1
PASS, WRONG, INFRA_ERROR = (
    one.value for one in (RewardOutcome.PASS, RewardOutcome.WRONG, RewardOutcome.INFRA_ERROR)
)
NOT_JUDGED = RewardOutcome.NOT_JUDGED.value
ScoreLine = dict[str, Any]
GroupT = TypeVar("GroupT")
"""What is said of one completion, as it is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl score`."""
    parser.usage = (
        "streamrl score ROWS --completions FILE (--reward REWARD ... | --config RECIPE)"
        " [--jsonl] [key=value ...]"
    )
    parser.add_argument(
        "rows", type=parse_nonempty, metavar="ROWS", help="rows, as data.train has them"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, e.g. scorer.timeout_s=5"
    )
    parser.add_argument(
        "--completions",
        type=parse_nonempty,
        required=True,
        metavar="FILE",
        help='JSONL of {"index": row from 0, "completion": text}; lines of one index are a group;'
        " line 12 of a JSONL file has index 11, blank lines counted",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        help="a kind, file.py:function, or {kind: regex, pattern: x, weight: 0.5}; repeatable",
    )
    parser.add_argument(
        "--config",
        type=parse_path,
        metavar="RECIPE",
        help="judge as this recipe or run directory does",
    )
    parser.add_argument("--prompt-key", help="column of the prompt (the recipe's; prompt)")
    parser.add_argument("--label-key", help="column of the ground truth")
    parser.add_argument("--split", help="split of a dataset that has several")
    parser.add_argument(
        "--jsonl", action="store_true", help="print only the lines, without a summary"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0, or 1 if there is a completion that could not be scored."""
    config = _load_score_config(arguments.config, arguments.reward, arguments.overrides)
    # What a user's file prints while it is imported is none of the lines.
    with contextlib.redirect_stdout(sys.stderr):
        judges = _build_reward_sets(config)
        groups = read_completion_groups(_choose_data_file(arguments, config), arguments.completions)
    began, lines = time.monotonic(), asyncio.run(_score_groups(judges, groups, config))
    if not arguments.jsonl:
        sources = {i: group.prompt.data_source for group in groups for i in group.line_indices}
        in_order = [sources[i] for i in range(len(lines))]
        killed = sum((Counter(one.drain_counts()) for one in judges.reward_sets), Counter[str]())
        text = summarize_scores(lines, in_order, killed, time.monotonic() - began)
        print("\n".join(text), file=sys.stderr)
    return EXIT_FAILED if any(line["score"] is None for line in lines) else 0


def _choose_data_file(arguments: argparse.Namespace, config: RunConfig) -> DataFile:
    """How the rows are read: as the recipe reads that file, but for what is said otherwise."""
    files = {file.path: file for file in (*config.data.train_files, *config.data.eval_files)}
    other = DataFile(arguments.rows, prompt_key=config.data.prompt_key)
    names = ("prompt_key", "label_key", "split")
    said = {name: vars(arguments)[name] for name in names if vars(arguments)[name] is not None}
    return replace(files.get(str(Path(arguments.rows).absolute()), other), **said)


def _load_score_config(
    recipe: Path | None, rewards: Sequence[str], overrides: Sequence[str]
) -> RunConfig:
    """The recipe's settings, or the defaults, with other rewards where some are named."""
    entries = ", ".join(_make_reward_entry(reward) for reward in rewards)
    # What combines a recipe's own components knows no others.
    named = [f"rewards=[{entries}]", "scorer.combine=''"] if rewards else []
    changes = [*named, *overrides]
    if recipe is not None:
        return load_config(recipe / "config.yaml" if recipe.is_dir() else recipe, changes)
    if not rewards:
        raise ConfigError("score: name a --reward (`streamrl rewards` lists them), or a --config")
    # A run cannot do without these two, and a score has no use for them.
    unused = OmegaConf.create({"model": {"path": "."}, "data": {"train": "."}})
    return build_config(unused, changes, place="score")


def _make_reward_entry(reward: str) -> str:
    """An entry of the list `rewards`, in YAML."""
    if reward.lstrip().startswith("{"):
        return reward
    entry = {"kind": reward}
    if ":" in reward or reward.endswith(".py"):
        path, function = split_reference(reward, setting="--reward")
        entry = {"kind": "function", "name": function, "path": path, "function": function}
    return json.dumps(entry, ensure_ascii=False)


@dataclass(frozen=True)
class RunRewardSets:
    """What a run says of completions: its rewards, and its costs where it has some."""

    rewards: RewardSet
    costs: RewardSet | None

    @property
    def reward_sets(self) -> list[RewardSet]:
        """Those there are."""
        return [self.rewards, *([self.costs] if self.costs else [])]


def _build_reward_sets(config: RunConfig) -> RunRewardSets:
    around = RewardContext(config.scorer, config.sandbox)
    costs = build_rewards(config.costs, around, score_spec=COSTS) if config.costs else None
    return RunRewardSets(build_rewards(config.rewards, around), costs)


async def _score_groups(
    judges: RunRewardSets, groups: Sequence[CompletionGroup], config: RunConfig
) -> list[ScoreLine]:
    """Judge all groups; print each line once all before it are there."""
    done: dict[int, ScoreLine] = {}
    lines: list[ScoreLine] = []

    def tell(group: CompletionGroup, found: Sequence[ScoreLine]) -> None:
        done.update(zip(group.line_indices, found, strict=True))
        while len(lines) in done:
            lines.append(done.pop(len(lines)))
            print(json.dumps(lines[-1]), flush=True)

    async def judge(group: CompletionGroup) -> tuple[CompletionGroup, Sequence[ScoreLine]]:
        return group, await score_group(judges, group, config.rewards)

    try:
        for one in judges.reward_sets:
            for note in await one.run_preflight():
                print(f"streamrl: {note}", file=sys.stderr)
            one.check_prompts([group.prompt for group in groups])
            await one.start()
        await score_concurrently(judge, groups, most=config.scorer.max_groups, tell=tell)
    finally:
        for one in judges.reward_sets:
            await one.close()
    return lines


async def score_concurrently(
    judge: Callable[[GroupT], Any],
    groups: Sequence[GroupT],
    *,
    most: int,
    tell: Callable[..., None],
) -> None:
    """Judge so many groups at once, and tell of each as it ends. Rewards bound their own time."""
    left, pending = iter(groups), set[asyncio.Task[Any]]()
    try:
        while True:
            room = islice(left, most - len(pending))
            pending |= {asyncio.create_task(judge(group)) for group in room}
            if not pending:
                return
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                tell(*task.result())
    finally:
        for task in pending:
            task.cancel()


async def score_group(
    judges: RunRewardSets, group: CompletionGroup, configs: Sequence[RewardConfig]
) -> Sequence[ScoreLine]:
    """A line for each completion of a group; `seconds` is of the group, waiting included."""
    index, began = parse_uid(group.prompt.uid)[1], time.perf_counter()
    try:
        found = await judges.rewards.judge_group(group.prompt, group.completions)
        costs = judges.costs and await judges.costs.judge_group(group.prompt, group.completions)
    except RewardError as error:
        line = {
            "index": index,
            "score": None,
            "components": {},
            "verdict": INFRA_ERROR,
            "verdicts": {},
        }
        line |= {"seconds": _measure_elapsed(began), "cause": error.cause, "error": str(error)}
        return [line] * len(group.completions)
    seconds = _measure_elapsed(began)
    lines = []
    for i, score in enumerate(found.totals.tolist()):
        said = describe_completion(found, i)
        verdict = combine_verdicts(said["verdicts"], configs)
        line = {"index": index, "score": score, "components": said["components"]}
        line |= {"verdict": verdict, "verdicts": said["verdicts"], "seconds": seconds}
        line |= {"numbers": said["numbers"]} if "numbers" in said else {}
        if costs:
            line |= {
                "cost": costs.totals[i].item(),
                "costs": describe_completion(costs, i)["components"],
            }
        details = {name: parts[i].detail for name, parts in found.components.items()}
        detail = "; ".join(f"{name}: {text}" for name, text in details.items() if text)
        lines.append(line | ({"detail": detail} if detail else {}))
    return lines


def _measure_elapsed(began: float) -> float:
    return round(time.perf_counter() - began, 6)


def combine_verdicts(verdicts: Mapping[str, str], configs: Sequence[RewardConfig]) -> str:
    """One word for all components: the first that is neither pass nor wrong, if there is one.

    Else pass, if all that count in the score pass; where none counts, if all pass. Components that
    say nothing of the completion are left out.
    """
    judged = {name: word for name, word in verdicts.items() if word != NOT_JUDGED}
    odd = [word for word in judged.values() if word not in (PASS, WRONG)]
    if odd:
        return odd[0]
    counts = {one.component_name for one in configs if one.weight or one.gate}
    counted = [word for name, word in judged.items() if name in counts]
    return PASS if all(word == PASS for word in counted or judged.values()) else WRONG
