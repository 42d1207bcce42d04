"""`streamrl episodes`: recorded rollouts of a run, turn by turn, as text, JSON or an HTML page.

The command reads only `rollouts/`. The run may still be active.
"""

import argparse
import json
import math
import os
from pathlib import Path

import msgspec
from rich.console import Console

from streamrl.calibration.run_trace import describe_missing_run
from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output.output_files import check_html_file, write_output_file
from streamrl.drawing.episode_page import groups_to_json, render_page
from streamrl.drawing.episode_text import print_groups
from streamrl.errors import ConfigError
from streamrl.telemetry.progress_line import show_progress
from streamrl.telemetry.rollout_log import (
    ROLLOUTS_FOLDER,
    RecordedGroup,
    RecordedRollout,
    list_recorded_steps,
    read_recorded_groups,
)


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
