"""`streamrl scale`: add or remove replicas of a running run."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from streamrl.cli.arguments.arg_types import parse_path, parse_whole_number
from streamrl.config.run_config import load_config
from streamrl.dataflow import SERVING_ROLES
from streamrl.errors import ConfigError
from streamrl.run_dir.control_requests import (
    LEAVE_TIMEOUT_S,
    PLACE_TIMEOUT_S,
    START_MARGIN_S,
    request_scale,
)
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.telemetry.progress import show_progress
from streamrl.weights.transport import estimate_model_send_s

OPTION_ROLES = {facts.label: role for role, facts in SERVING_ROLES.items()}
"""Role that each option scales."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=parse_path, metavar="RUN", help="run directory")
    for option, role in OPTION_ROLES.items():
        noun = f"{role.replace('_', ' ')} replicas" if option == role else option
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=partial(parse_whole_number, least=1),
            metavar="N",
            help=f"scale to N {noun}",
        )


def run(arguments: argparse.Namespace) -> int:
    options = vars(arguments)
    counts = {option: options[option] for option in OPTION_ROLES if options[option] is not None}
    if not counts:
        raise ConfigError("scale: name a role to scale, e.g. --generators 4")
    with show_progress(f"waiting for {arguments.run_dir}"):
        timeout_s = compute_timeout_s(arguments.run_dir, counts)
        wanted = {OPTION_ROLES[option]: count for option, count in counts.items()}
        answer = request_scale(arguments.run_dir, wanted, timeout_s=timeout_s)
    if not answer.is_done:
        raise ConfigError("; ".join(answer.lines))
    print("\n".join(answer.lines))
    return 0


def compute_timeout_s(run_dir: Path, counts: Mapping[str, int]) -> float:
    """Return the seconds to wait for an answer: the longest that starts and leaves may take.

    counts: replicas by option name. Raises ConfigError if the run or a role does not exist.
    """
    config = load_config(check_run_dir(run_dir), skips_dry_run=True)
    role_by_stage = {call.stage: call.role for call in config.dataflow.calls}
    for option in counts:
        if (role := OPTION_ROLES[option]) not in config.dataflow.calls_by_role:
            # Stages of models that score are named like their roles.
            host = role_by_stage.get(role)
            text = f": the ranks of {host} compute it" if host else ""
            raise ConfigError(f"--{option.replace('_', '-')}: this run has no {role}{text}")
    start_s = config.generator.start_timeout_s + START_MARGIN_S
    folders = (Path(config.get_model_path(role)) for role in config.dataflow.trained_roles)
    sizes = (file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    load_s = config.pipeline.stall_s + estimate_model_send_s(sum(sizes))
    return PLACE_TIMEOUT_S + start_s + load_s + LEAVE_TIMEOUT_S
