"""Arguments of `streamrl plan` and `streamrl simulate`: a run, a cluster, models and lengths."""

import argparse
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path, parse_whole_number
from streamrl.cli.arguments.config_args import add_config_arguments
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import REWARD_ROLES
from streamrl.errors import ConfigError, extend_errors
from streamrl.files.bounded_read import MIB, parse_json, read_small_text, wrap_file_errors
from streamrl.placement.clusters import Cluster
from streamrl.planner.calibration.run_trace import load_run_trace
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import (
    EmpiricalLengths,
    LengthDistribution,
    LognormalLengths,
    Workload,
    make_fixed_lengths,
)
from streamrl.planner.to_planner_problem import (
    PlannerRequest,
    build_planner_problem,
    build_run_constants,
    measure_prompt_tokens,
)

MAX_LENGTHS_BYTES = 16 * MIB
"""Room for millions of lengths."""
HOUR_S = 3600.0
Length = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Lengths = Annotated[list[Length], msgspec.Meta(min_length=1)]
LENGTH_RULE = "whole numbers of tokens, from 1 to 1,000,000,000"
Median = Annotated[float, msgspec.Meta(le=1_000_000_000)]
LENGTHS_HELP = (
    "completion lengths: fixed:TOKENS, lognormal:MEDIAN:SIGMA, a file of numbers, or a run"
    " directory (default: every completion has as many tokens as the config allows)"
)


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that define the planner problem: run, cluster, models, lengths."""
    add_config_arguments(parser)
    parser.add_argument(
        "--cluster",
        type=parse_nonempty,
        required=True,
        metavar="8xH100",
        help="devices, e.g. 64xH100, 16x8xA100@200Gb or 8xA100,8xV100",
    )
    parser.add_argument(
        "--model",
        type=parse_nonempty,
        action="append",
        default=[],
        metavar="[ROLE=]NAME",
        help="model size by name (llama-7b, qwen2.5-32b, ...) or model directory, instead of the"
        " config's; ROLE=NAME applies to that role only",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help="mean prompt length in tokens (default: measured on data.train)",
    )
    parser.add_argument("--lengths", type=parse_nonempty, metavar="SPEC", help=LENGTHS_HELP)
    parser.add_argument(
        "--filtered",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="fraction of sampled groups that the group filter rejects (0)",
    )
    parser.add_argument(
        "--constants",
        type=parse_path,
        metavar="FILE",
        help="YAML file of cost constants, as written by `streamrl calibrate`",
    )
    seed_type = partial(parse_whole_number, least=0)
    parser.add_argument("--seed", type=seed_type, default=0, metavar="N", help="random seed (0)")


@dataclass(frozen=True)
class PlannerInputs:
    """Inputs of the planner from the command line, which a run's config does not contain."""

    cluster: Cluster
    request: PlannerRequest
    constants: CostConstants

    def build_problem(
        self, config: RunConfig, cluster: Cluster | None = None
    ) -> tuple[PlacementProblem, CostConstants]:
        """Build the planner problem of a run, and the cost constants adapted to the run.

        cluster: replaces `self.cluster`. Raises ConfigError, for example if the longest rollout
        exceeds pipeline.micro_batch_tokens.
        """
        cluster = cluster or self.cluster
        problem = build_planner_problem(config, cluster, self.request)
        with extend_errors(after="; set their lengths with --prompt-tokens and --lengths"):
            problem.workload.check_micro_batch_tokens("pipeline.micro_batch_tokens")
        return problem, build_run_constants(config, self.constants)


def read_planner_inputs(arguments: argparse.Namespace, config: RunConfig) -> PlannerInputs:
    """Read the planner options of the command line. Raises ConfigError for an invalid option.

    Without --prompt-tokens the prompt lengths are measured on the run's data files.
    """
    cluster = Cluster.from_text(arguments.cluster)
    constants = CostConstants.from_cluster(cluster)
    if arguments.constants is not None:
        constants = CostConstants.from_yaml(arguments.constants, constants)
    lengths = arguments.lengths and read_lengths(arguments.lengths, config)
    filtered = arguments.filtered
    if filtered and config.filter.kind == "none":
        raise ConfigError(
            f"--filtered {filtered:g} has no effect: filter.kind=none. Remove it or set filter.kind"
        )
    mean, longest = arguments.prompt_tokens, config.data.max_prompt_tokens
    if mean is not None and not 0 < mean < math.inf:
        raise ConfigError(f"--prompt-tokens {mean:g}: must be above 0 and finite")
    if mean is None:
        mean, longest = measure_prompt_tokens(config)
    models = read_models(config, arguments.model)
    request = PlannerRequest(mean, models, lengths, filtered, longest)
    return PlannerInputs(cluster, request, constants)


def check_simulation_time(seconds: float, workload: Workload, *, prefix: str) -> None:
    """Raise ConfigError if a simulation would take longer than an hour.

    seconds: estimated duration. prefix: start of the error message, such as "--steps 50, ".
    """
    if seconds > HOUR_S:
        raise ConfigError(
            f"{prefix}pipeline.groups_per_step={workload.groups_per_step},"
            f" algorithm.group_size={workload.group_size}: about {seconds / HOUR_S:.3g} h to"
            " simulate; the limit is 1 h"
        )


def read_models(config: RunConfig, words: list[str]) -> dict[str, str]:
    """Return model names by role from the values of --model, each [ROLE=]NAME.

    A NAME without a role applies to all models except those of rewards and costs. Raises
    ConfigError if two values name the same role.
    """
    roles = {call.followed_role or call.role for call in config.dataflow.calls} - {*REWARD_ROLES}
    models: dict[str, str] = {}
    words_by_role: dict[str, str] = {}
    for word in words:
        role, equals, name = word.rpartition("=")
        if role in words_by_role:
            raise ConfigError(f"--model {word}: --model {words_by_role[role]} names the same role")
        words_by_role[role] = word
        if equals:
            models[role] = name
        else:
            models = {**dict.fromkeys(roles, name), **models}
    return models


def read_lengths(text: str, config: RunConfig) -> LengthDistribution:
    """Parse the value of --lengths, the distribution of completion lengths in tokens.

    Raises ConfigError for a malformed value or a length above the config's limit.
    """
    path, limit = Path(text), config.max_completion_tokens
    is_run = os.path.isdir(path)
    lengths = load_run_trace(path).lengths if is_run else _parse_lengths(text, limit)
    if lengths.max_tokens > limit:
        raise ConfigError(
            f"--lengths {text}: {lengths.max_tokens} tokens: must be at most"
            f" {config.completion_limit_key}={limit}"
        )
    return lengths


def _parse_lengths(text: str, limit: int) -> LengthDistribution:
    """Parse fixed:N, lognormal:MEDIAN:SIGMA or a file of numbers."""
    kind, *numbers = text.split(":")
    try:
        if kind in ("fixed", "lognormal") and not os.path.exists(text):
            rule = f"write fixed:N or lognormal:MEDIAN:SIGMA; lengths are {LENGTH_RULE}"
            loaded: Any = list(map(float, numbers))
            if kind == "fixed":
                return make_fixed_lengths(*msgspec.convert(loaded, tuple[Length], strict=False))
            return LognormalLengths(*msgspec.convert(loaded, tuple[Median, float]), limit)
        rule = f"must hold lengths, which are {LENGTH_RULE}, with blanks between or as a JSON list"
        with wrap_file_errors(f"--lengths {text}"):
            words = read_small_text(Path(text), most_bytes=MAX_LENGTHS_BYTES)
        is_json = words.lstrip().startswith("[")
        loaded = parse_json(words) if is_json else list(map(float, words.split()))
        return EmpiricalLengths.from_samples(msgspec.convert(loaded, Lengths, strict=False))
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"--lengths {text}: {rule}") from None
