"""`streamrl episodes`: recorded rollouts of a run, turn by turn, as text or JSON.

The command reads only `rollouts/`. The run may still be active.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path, parse_whole_number
from streamrl.errors import ConfigError
from streamrl.files.printable_text import format_quantity, make_printable
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.telemetry.progress import show_progress
from streamrl.telemetry.rollout_log import (
    PROMPT,
    ROLLOUTS_FOLDER,
    SAMPLED,
    SCAFFOLD,
    RecordedGroup,
    RecordedRollout,
    RecordedTurn,
    groups_to_json,
    list_recorded_steps,
    read_recorded_groups,
)

MAX_SCORES = 8
"""Most scores of a turn that are printed with their tokens."""


def print_groups(groups: Sequence[RecordedGroup]) -> None:
    for number, group in enumerate(groups):
        if number:
            print()
        for line in _describe_group(group):
            print(make_printable(line))


def _describe_group(group: RecordedGroup) -> Iterator[str]:
    mean = f"mean score {group.mean_score:.3g}"
    size = format_quantity(len(group.rollouts), "rollout")
    environment = f", environment {group.environment}" if group.environment else ""
    yield f"step {group.step}, uid {group.uid}{environment}: {size}, {mean}"
    if group.ground_truth not in (None, ""):
        yield f"ground truth: {group.ground_truth}"
    prompt = _find_common_prompt(group)
    if prompt is not None:
        yield "prompt"
        yield _indent(prompt)
    for number, rollout in enumerate(group.rollouts, start=1):
        yield ""
        relative = rollout.score - group.mean_score
        facts = "".join(f", {fact}" for fact in _list_facts(rollout))
        yield (
            f"rollout {number} of {len(group.rollouts)}: score {rollout.score:.3g}"
            f" (relative {relative:+.3g}){facts}"
        )
        yield from _describe_turns(rollout, has_prompt=prompt is None)


def _find_common_prompt(group: RecordedGroup) -> str | None:
    """Return the prompt of all rollouts; None if they differ, as an environment's may."""
    rendered = {rollout.prompt_text for rollout in group.rollouts} - {None}
    if len(rendered) > 1:
        return None
    messages = "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in group.prompt)
    return next(iter(rendered), messages) or None


def _describe_turns(rollout: RecordedRollout, *, has_prompt: bool) -> Iterator[str]:
    numbers = count(1)
    for index, turn in enumerate(rollout.visible_turns):
        is_prompt = turn.source == PROMPT
        if turn.source == SCAFFOLD or (is_prompt and not (index or has_prompt)):
            continue
        if index and is_prompt:
            yield "new sample: the chat template rewrites earlier turns"
        yield _describe_turn(turn, numbers)
        yield _indent(turn.text)


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
    size = "" if turn.tokens is None else f" ({format_quantity(turn.tokens, 'token')})"
    if turn.source != SAMPLED:
        return f"{turn.source}{size}"
    if turn.tokens is None:
        return "completion"
    facts: list[Any] = [turn.outcome] if turn.outcome else []
    facts += [] if turn.reward is None else [f"reward {turn.reward:.3g}"]
    facts += [f"score {score:.3g} on token {i + 1}" for i, score in turn.scores[:MAX_SCORES]]
    facts += [f"{len(turn.scores) - MAX_SCORES} more scores"] * (len(turn.scores) > MAX_SCORES)
    versions = [version for version, _ in turn.versions]
    facts += [_format_versions(min(versions), max(versions))] if versions else []
    return f"turn {next(numbers)}{size}: {', '.join(facts)}"


def _format_versions(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip("\n").split("\n"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl episodes RUN [--step N | --last N | --uid UID] [--worst] [--json]"
    parser.add_argument("run_dir", type=parse_path, metavar="RUN", help="run directory")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, metavar="N", help="rollouts that step N trained")
    chosen.add_argument(
        "--last",
        type=partial(parse_whole_number, least=1),
        default=1,
        metavar="N",
        help="rollouts of the last N recorded steps (1)",
    )
    chosen.add_argument(
        "--uid", type=parse_nonempty, metavar="UID", help="one group, epoch:index:attempt"
    )
    parser.add_argument(
        "--worst", action="store_true", help="lowest scores first, of groups and of their rollouts"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    with show_progress(f"reading {arguments.run_dir}"):
        groups = _select_groups(arguments)
    if arguments.worst:
        groups = _sort_by_score(groups)
    if arguments.json:
        print(json.dumps(groups_to_json(groups)))
    else:
        print_groups(groups)
    return 0


def _select_groups(arguments: argparse.Namespace) -> list[RecordedGroup]:
    """Read the groups of the chosen steps. Raises ConfigError if there are none."""
    run_dir: Path = arguments.run_dir
    check_run_dir(run_dir)
    steps = list_recorded_steps(run_dir)
    if not steps:
        if any((run_dir / ROLLOUTS_FOLDER).glob("step_*.jsonl")):
            raise ConfigError(
                f"{run_dir}: {ROLLOUTS_FOLDER}/ has only step_*.jsonl, which versions up to"
                " 2026-11-26 wrote and no command reads any more; each of their lines is a group,"
                " as JSON"
            )
        raise ConfigError(
            f"{run_dir}: no {ROLLOUTS_FOLDER}/: telemetry.rollouts.every=0, or no step has ended"
        )
    steps_to_read = steps[-arguments.last :]
    if arguments.step is not None:
        steps_to_read = [step for step in steps if step == arguments.step]
    if arguments.uid is not None:
        steps_to_read = steps[::-1]
    groups: Iterator[RecordedGroup] = (
        group for step in steps_to_read for group in read_recorded_groups(run_dir, step)
    )
    if arguments.uid is not None:
        groups = islice((group for group in groups if group.uid == arguments.uid), 1)
    chosen = [*groups]
    if not chosen:
        raise ConfigError(
            f"{run_dir}: no such rollouts are recorded; {ROLLOUTS_FOLDER}/ has"
            f" {format_quantity(len(steps), 'step')} from {steps[0]} to {steps[-1]}"
        )
    return chosen


def _sort_by_score(groups: list[RecordedGroup]) -> list[RecordedGroup]:
    def get_score(rollout: RecordedRollout) -> float:
        return -math.inf if math.isnan(rollout.score) else rollout.score

    ordered = [
        msgspec.structs.replace(group, rollouts=tuple(sorted(group.rollouts, key=get_score)))
        for group in groups
    ]
    return sorted(ordered, key=lambda group: min(map(get_score, group.rollouts), default=0.0))
