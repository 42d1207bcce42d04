"""`streamrl scale`: ask a run that is under way for more generators or scorers, or for fewer."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from streamrl.cli.arguments.arg_types import parse_path
from streamrl.config import load_config
from streamrl.errors import ConfigError
from streamrl.run_dir.control_requests import (
    LEAVE_TIMEOUT_S,
    PLACE_TIMEOUT_S,
    START_MARGIN_S,
    request_scale,
)

OPTION_ROLES = {
    "generators": "generator",
    "scorers": "reward",
    "cost": "cost",
    "reference": "reference",
    "value": "value",
    "cost_value": "cost_value",
}
"""The role that each option asks for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl scale`."""
    parser.add_argument("run_dir", type=parse_path, metavar="RUN", help="directory of the run")
    for option, role in OPTION_ROLES.items():
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"have N replicas of {'the ' + role if role == option else option}",
        )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="how long to wait for the run's answer, s; by default as long as a start may take",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    given = vars(arguments)
    counts = {option: given[option] for option in OPTION_ROLES if given[option] is not None}
    if not counts:
        raise ConfigError("scale: say what is wanted, such as --generators 4")
    for option, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {count}: must be 1 or more")
    timeout_s = _choose_timeout_s(arguments.run_dir, counts, arguments.timeout)
    wanted = {OPTION_ROLES[option]: count for option, count in counts.items()}
    answer = request_scale(arguments.run_dir, wanted, timeout_s=timeout_s)
    if not answer.is_done:
        raise ConfigError("; ".join(answer.lines))
    print("\n".join(answer.lines))
    return 0


def _choose_timeout_s(run_dir: Path, counts: Mapping[str, int], given: float | None) -> float:
    """How long the answer may take. Raises ConfigError for what is no run, or lacks a role."""
    if not (run_dir / "config.yaml").is_file():
        rule = "holds no config.yaml" if run_dir.is_dir() else "no such directory"
        raise ConfigError(f"scale {run_dir}: no run: {rule}")
    config = load_config(run_dir / "config.yaml", is_rehearsed=True)
    for option in counts:
        if OPTION_ROLES[option] not in config.dataflow.calls_by_role:
            raise ConfigError(
                f"--{option.replace('_', '-')}: this run has no {OPTION_ROLES[option]}"
            )
    if given is not None:
        return given
    start_s = config.generator.start_timeout_s + START_MARGIN_S
    return PLACE_TIMEOUT_S + start_s + config.pipeline.stall_s + LEAVE_TIMEOUT_S
