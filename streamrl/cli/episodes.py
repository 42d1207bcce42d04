"""`streamrl episodes`: recorded rollouts of a run, turn by turn, as text, JSON or an HTML page.

The command reads only `rollouts/`. The run may still be active.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output.output_files import check_html_file, write_output_file
from streamrl.errors import ConfigError
from streamrl.files.printable_text import make_printable
from streamrl.planner.calibration.run_trace import describe_missing_run
from streamrl.telemetry.drawing.episode_page import groups_to_json, render_page
from streamrl.telemetry.progress_line import show_progress
from streamrl.telemetry.rollout_log import (
    PROMPT,
    ROLLOUTS_FOLDER,
    SAMPLED,
    SCAFFOLD,
    RecordedGroup,
    RecordedRollout,
    RecordedTurn,
    list_recorded_steps,
    read_recorded_groups,
)

MIN_COLUMN_WIDTH = 56
_STYLES = {PROMPT: "dim", SAMPLED: "", "observation": "yellow"}


def print_groups(console: Console, groups: Sequence[RecordedGroup]) -> None:
    """Print groups; on a terminal, as many rollouts side by side as its width allows.

    Output to a file or pipe keeps its lines unbroken.
    """
    num_columns = max(1, console.width // MIN_COLUMN_WIDTH) if console.is_terminal else 1
    for number, group in enumerate(groups):
        blocks = [
            list(_describe_rollout(group, rollout, i))
            for i, rollout in enumerate(group.rollouts, start=1)
        ]
        rows = [
            _arrange_row(blocks[i : i + num_columns], num_columns)
            for i in range(0, len(blocks), num_columns)
        ]
        gap = [Text()] if number else []
        console.print(
            Group(*gap, *_describe_group(group), *rows), soft_wrap=not console.is_terminal
        )


def _arrange_row(blocks: Sequence[Sequence[Text]], num_columns: int) -> RenderableType:
    if num_columns == 1:
        return Group(Text(), *blocks[0])
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in range(num_columns):
        table.add_column(ratio=1, overflow="fold")
    table.add_row(*(Group(*block) for block in blocks))
    return Group(Text(), table)


def _describe_group(group: RecordedGroup) -> Iterator[Text]:
    mean = f"mean score {group.mean_score:.3g}"
    size = _count(len(group.rollouts), "rollout")
    environment = f", environment {group.environment}" if group.environment else ""
    title = f"step {group.step}, uid {group.uid}{environment}: {size}, {mean}"
    yield Text(make_printable(title), style="bold")
    if group.ground_truth not in (None, ""):
        yield Text(make_printable(f"ground truth: {group.ground_truth}"))
    prompt = _find_common_prompt(group)
    if prompt is not None:
        yield Text("prompt", style="bold")
        yield _indent(prompt, _STYLES[PROMPT])


def _find_common_prompt(group: RecordedGroup) -> str | None:
    """Return the prompt of all rollouts; None if they differ, as an environment's may."""
    rendered = {rollout.prompt_text for rollout in group.rollouts} - {None}
    if len(rendered) > 1:
        return None
    messages = "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in group.prompt)
    return next(iter(rendered), messages) or None


def _describe_rollout(
    group: RecordedGroup, rollout: RecordedRollout, number: int
) -> Iterator[Text]:
    relative = rollout.score - group.mean_score
    style = "green" if relative > 0 else "red" if relative < 0 else ""
    yield Text.assemble(
        (f"rollout {number} of {len(group.rollouts)}: ", "bold"),
        (f"score {rollout.score:.3g} (relative {relative:+.3g})", style),
        make_printable("".join(f", {fact}" for fact in _list_facts(rollout))),
    )
    turn_numbers = count(1)
    for index, turn in enumerate(rollout.visible_turns):
        is_shown_above = index == 0 and turn.source == PROMPT and _find_common_prompt(group)
        if turn.source == SCAFFOLD or is_shown_above:
            continue
        if index and turn.source == PROMPT:
            yield Text("new sample: the chat template rewrites earlier turns", style="bold")
        yield Text(make_printable(_describe_turn(turn, turn_numbers)), style="bold")
        yield _indent(turn.text, _STYLES.get(turn.source, ""))


def _list_facts(rollout: RecordedRollout) -> Iterator[str]:
    for name, score in rollout.components.items():
        value = "not judged" if score is None else f"{score:.3g}"
        yield f"{name} {value} ({rollout.verdicts.get(name, 'no verdict')})"
    if rollout.environment_score is not None:
        yield f"environment score {rollout.environment_score:.3g}"
    if rollout.finish_reason is not None:
        yield f"finish reason {rollout.finish_reason}"
    if rollout.version_range is not None:
        yield _format_versions(*rollout.version_range)


def _describe_turn(turn: RecordedTurn, numbers: Iterator[int]) -> str:
    size = "" if turn.tokens is None else f" ({_count(turn.tokens, 'token')})"
    if turn.source != SAMPLED:
        return f"{turn.source}{size}"
    if turn.tokens is None:
        return "completion"
    facts: list[Any] = [turn.outcome] if turn.outcome else []
    facts += [] if turn.reward is None else [f"reward {turn.reward:.3g}"]
    versions = [version for version, _ in turn.versions]
    facts += [_format_versions(min(versions), max(versions))] if versions else []
    return f"turn {next(numbers)}{size}: {', '.join(facts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _format_versions(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def _indent(text: str, style: str) -> Text:
    lines = make_printable(text).rstrip("\n").split("\n")
    return Text("\n".join(f"  {line}" for line in lines), style=style)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "streamrl episodes RUN [--step N | --last N | --uid UID] [--worst] [--html FILE | --json]"
    )
    parser.add_argument("run_dir", type=parse_path, metavar="RUN", help="run directory")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, metavar="N", help="rollouts that step N trained")
    chosen.add_argument(
        "--last", type=int, default=1, metavar="N", help="rollouts of the last N recorded steps (1)"
    )
    chosen.add_argument(
        "--uid", type=parse_nonempty, metavar="UID", help="one group, epoch:index:attempt"
    )
    parser.add_argument(
        "--worst", action="store_true", help="lowest scores first, of groups and of their rollouts"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--html",
        type=parse_path,
        metavar="FILE",
        help="write a page with every token: source, version, logprob, relative score",
    )
    form.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.html is not None:
        check_html_file(arguments.html)
    with show_progress(f"reading {arguments.run_dir}"):
        groups = _select_groups(arguments)
    if arguments.worst:
        groups = _sort_by_score(groups)
    if arguments.html is not None:
        write_output_file("--html", arguments.html, render_page(str(arguments.run_dir), groups))
        num_rollouts = sum(len(group.rollouts) for group in groups)
        print(f"{arguments.html}: {num_rollouts} rollouts of {len(groups)} groups")
    elif arguments.json:
        print(json.dumps(groups_to_json(groups)))
    else:
        print_groups(Console(highlight=False), groups)
    return 0


def _select_groups(arguments: argparse.Namespace) -> list[RecordedGroup]:
    """Read the groups of the chosen steps. Raises ConfigError if there are none."""
    run_dir: Path = arguments.run_dir
    if not os.path.isfile(run_dir / "config.yaml"):
        raise ConfigError(f"{run_dir}: not a run: {describe_missing_run(run_dir)}")
    steps = list_recorded_steps(run_dir)
    if not steps:
        raise ConfigError(
            f"{run_dir}: no {ROLLOUTS_FOLDER}/: telemetry.rollouts.every=0, or no step has ended"
        )
    if arguments.uid is not None:
        return [_find_group(run_dir, steps, arguments.uid)]
    if arguments.step is not None:
        if arguments.step not in steps:
            nearest = min(steps, key=lambda step: abs(step - arguments.step))
            raise ConfigError(
                f"--step {arguments.step}: no recorded rollouts; {len(steps)} steps from"
                f" {steps[0]} to {steps[-1]} have some, the nearest is {nearest}"
            )
        steps = [arguments.step]
    elif arguments.last < 1:
        raise ConfigError(f"--last {arguments.last}: must be at least 1")
    return [
        group for step in steps[-arguments.last :] for group in read_recorded_groups(run_dir, step)
    ]


def _find_group(run_dir: Path, steps: list[int], uid: str) -> RecordedGroup:
    """Return a group by uid, which at most one training step has."""
    for step in reversed(steps):
        for group in read_recorded_groups(run_dir, step):
            if group.uid == uid:
                return group
    raise ConfigError(
        f"--uid {uid}: not recorded: {ROLLOUTS_FOLDER}/ has {len(steps)} steps, and"
        f" `streamrl episodes {run_dir} --last {len(steps)}` shows all"
    )


def _sort_by_score(groups: list[RecordedGroup]) -> list[RecordedGroup]:
    def get_score(rollout: RecordedRollout) -> float:
        return -math.inf if math.isnan(rollout.score) else rollout.score

    ordered = [
        msgspec.structs.replace(group, rollouts=tuple(sorted(group.rollouts, key=get_score)))
        for group in groups
    ]
    return sorted(ordered, key=lambda group: min(map(get_score, group.rollouts), default=0.0))
