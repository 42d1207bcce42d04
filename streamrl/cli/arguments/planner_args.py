"""What `streamrl plan` and `streamrl simulate` are asked: a run, a cluster, sizes and lengths."""

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.calibration.run_trace import lengths_of_run
from streamrl.cli.arguments.arg_types import named, named_path
from streamrl.cli.output.text_table import inner_percent
from streamrl.config import RunConfig, load_config
from streamrl.config.to_planner_problem import Asked, problem_of, prompt_tokens, run_constants
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import MIB, parse_json, read_small, read_small_yaml
from streamrl.files.typed_settings import unreadable
from streamrl.placement import (
    Cluster,
    EmpiricalLengths,
    FixedLength,
    Lengths,
    LognormalLengths,
    Problem,
    Workload,
)
from streamrl.placement.costs import Constants

MOST_LENGTHS_BYTES = 16 * MIB
"""Of a file of lengths: millions of them."""
HOUR_S = 3600.0
MOST_MEDIAN = 1_000_000_000
LENGTHS_HELP = (
    "of completions: fixed:TOKENS, lognormal:MEDIAN:SIGMA, a file of numbers, or a run directory;"
    " by default all have generator.max_new_tokens, the most they can"
)


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say what is to be placed, and on what."""
    parser.add_argument("config", type=named_path, metavar="CONFIG", help="a YAML file, or a run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings that override it"
    )
    parser.add_argument(
        "--cluster",
        type=named,
        required=True,
        metavar="FILE|8xH100",
        help="devices, as 64xH100, 16x8xA100@200Gb or 8xA100,8xV100, or a file with its nodes",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="only the first N devices of it")
    parser.add_argument(
        "--model",
        type=named,
        action="append",
        default=[],
        metavar="[ROLE=]NAME",
        help="a size by name (llama-7b, qwen2.5-32b, ...) or a model directory, in place of the"
        " config's; with a role only that one's",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help="mean of a prompt; by default of data.train",
    )
    parser.add_argument("--lengths", type=named, metavar="SPEC", help=LENGTHS_HELP)
    parser.add_argument(
        "--filtered",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of all groups that are sampled, the part that filter takes out (0)",
    )
    parser.add_argument(
        "--constants",
        type=named_path,
        metavar="FILE",
        help="of the costs, as calibrate writes them",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is random (0)")


@dataclass(frozen=True)
class Question:
    """What is asked beside a run's config: devices, sizes and lengths, and what devices give."""

    cluster: Cluster
    asked: Asked
    constants: Constants

    def of(self, config: RunConfig, cluster: Cluster | None = None) -> tuple[Problem, Constants]:
        """The problem of a config, on another cluster if one is given. Raises ConfigError."""
        cluster = cluster or self.cluster
        problem = problem_of(config, cluster, self.asked)
        try:
            problem.workload.check_room("pipeline.micro_batch_tokens")
        except ConfigError as error:
            hint = "--prompt-tokens and --lengths say how long they are"
            raise ConfigError(f"{error}; {hint}") from None
        return problem, run_constants(config, self.constants, on_gpu=not cluster.is_cpu)


def read_problem(arguments: argparse.Namespace, config: RunConfig) -> tuple[Problem, Constants]:
    """What is asked about a run, and the constants. Raises ConfigError."""
    return read_question(arguments, config).of(config)


def read_question(arguments: argparse.Namespace, config: RunConfig) -> Question:
    """What the options say. Raises ConfigError."""
    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed}: must be 0 or more")
    cluster = read_cluster(arguments.cluster)
    if arguments.gpus is not None:
        cluster = cluster.first(arguments.gpus)
    constants = Constants.of(cluster)
    if arguments.constants is not None:
        constants = Constants.read(arguments.constants, constants)
    lengths = None
    if arguments.lengths is not None:
        lengths = read_lengths(arguments.lengths, config.generator.max_new_tokens)
    filtered = arguments.filtered
    if filtered and config.filter.kind == "none":
        raise ConfigError(f"--filtered {filtered:g}: means nothing to filter.kind=none")
    mean, longest = arguments.prompt_tokens, config.data.max_prompt_tokens
    if mean is not None and not 0 < mean < math.inf:
        raise ConfigError(f"--prompt-tokens {mean:g}: must be above 0 and finite")
    if mean is None:
        mean, longest = prompt_tokens(config)
    asked = Asked(mean, read_models(config, arguments.model), lengths, filtered, longest)
    return Question(cluster, asked, constants)


def check_time(seconds: float, workload: Workload, *, place: str) -> None:
    """Raise ConfigError for what takes more than an hour to simulate."""
    if seconds > HOUR_S:
        raise ConfigError(
            f"{place}pipeline.groups_per_step={workload.groups_per_step},"
            f" algorithm.group_size={workload.group_size}: about {seconds / HOUR_S:.3g} h to"
            " simulate: must be at most 1 h"
        )


def read_config(path: Path, overrides: list[str]) -> RunConfig:
    """A config file's, or a run directory's."""
    source = path / "config.yaml" if os.path.isdir(path) else path
    return load_config(source, overrides)


def read_cluster(text: str) -> Cluster:
    """Of a file if there is one of that name, else as it is written."""
    path = Path(text)
    if not os.path.exists(path) and path.suffix not in (".yaml", ".yml", ".json"):
        return Cluster.parse(text)
    try:
        loaded = read_small_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cluster {path}: {unreadable(error)}") from None
    return Cluster.of_dict(loaded, place=f"cluster {path}")


def read_models(config: RunConfig, words: list[str]) -> dict[str, str]:
    """Sizes by role of [ROLE=]NAME; one without a role is that of every model but a reward's."""
    roles = {call.follows or call.role for call in config.dataflow.calls} - {"reward", "cost"}
    found: dict[str, str] = {}
    named: dict[str, str] = {}
    for word in words:
        role, equals, name = word.rpartition("=")
        if role in named:
            raise ConfigError(f"--model {word}: --model {named[role]} is given, too")
        named[role] = word
        if equals:
            found[role] = name
        else:
            found = {**dict.fromkeys(roles, name), **found}
    return found


def read_lengths(text: str, limit: int) -> Lengths:
    """Of SPEC. Raises ConfigError, also for some that are longer than `limit`."""
    lengths = _lengths(text, limit)
    if lengths.most > limit:
        raise ConfigError(
            f"--lengths {text}: {lengths.most} tokens: must be at most"
            f" generator.max_new_tokens={limit}"
        )
    return lengths


def _lengths(text: str, limit: int) -> Lengths:
    kind, *numbers = text.split(":")
    if kind in ("fixed", "lognormal") and not os.path.exists(text):
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if kind == "fixed" and len(values) == 1:
            return FixedLength(_tokens(numbers[0], text))
        if kind == "lognormal" and len(values) == len(("median", "sigma")):
            if values[0] > MOST_MEDIAN:
                raise ConfigError(f"--lengths {text}: median: must be at most {MOST_MEDIAN}")
            return LognormalLengths(values[0], values[1], limit)
        raise ConfigError(
            f"--lengths {text}: must be fixed:TOKENS or lognormal:MEDIAN:SIGMA, in numbers"
        )
    path = Path(text)
    if os.path.isdir(path):
        return lengths_of_run(path)
    try:
        words = read_small(path, most_bytes=MOST_LENGTHS_BYTES)
        loaded = parse_json(words) if words.lstrip().startswith("[") else words.split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {text}: {unreadable(error)}") from None
    found = [_tokens(word, text) for word in loaded]
    if not found:
        raise ConfigError(f"--lengths {text}: must be one length or more")
    return EmpiricalLengths.of(found)


def _tokens(word: Any, text: str) -> int:
    """A length, of a word or of JSON. Raises ConfigError, naming SPEC, for what is none."""
    try:
        number = float(word)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(word, bool) or not number.is_integer() or number < 1:
        raise ConfigError(f"--lengths {text}: {word!r:.40}: must be whole tokens, at least 1")
    return int(number)


def problem_line(config: RunConfig, problem: Problem) -> str:
    """What is placed on what, for a person."""
    workload = problem.workload
    models = ", ".join(f"{role} {shape.name}" for role, shape in problem.models.items())
    return (
        f"{config.algorithm.name} on {problem.cluster} ({problem.cluster.size} devices): {models}\n"
        f"a step: {workload.groups_per_step} groups of {workload.group_size}, prompts of"
        f" {workload.prompt_tokens:.0f} tokens, completions of {workload.lengths.mean:.0f} (at most"
        f" {workload.lengths.most}), {workload.updates} updates"
        + (
            f"; {inner_percent(workload.filtered)} of all groups are filtered"
            if workload.filtered
            else ""
        )
    )
