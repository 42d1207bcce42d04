"""The bounds of staleness that `streamrl plan` is asked for, each judged by the run's settings.

Neither the bound nor the placement that the config itself has is what is planned for.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from streamrl.cli.arguments.planner_args import read_config
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.placement.placements import MAX_STALENESS
from streamrl.placement.search import ExcludedBound

DEFAULT_BOUNDS = "0,1,2,4"


def parse_bounds(text: str) -> Sequence[int]:
    """Bounds of staleness, as 0,1,4. Raises ConfigError."""
    words = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,9}\s*", w) and int(w) <= MAX_STALENESS for w in words):
        raise ConfigError(
            f"--max-staleness {text}: must be numbers from 0 to {MAX_STALENESS}, as 0,1"
        )
    return sorted({int(word) for word in words})


def read_staleness_request(
    arguments: argparse.Namespace,
) -> tuple[RunConfig, int | None, list[int], list[ExcludedBound]]:
    """The run to be planned, its own bound if that is to be kept, and bounds to plan for.

    With those that its settings refuse, and why. Raises ConfigError for a wrong one.
    """
    path, overrides = arguments.config, arguments.overrides
    if arguments.max_staleness is not None:
        bounds = parse_bounds(arguments.max_staleness)
        config = read_bounded_config(path, overrides, bounds)
        return config, None, *split_allowed_bounds(config, bounds)
    own = read_config(path, overrides).pipeline.max_staleness
    if own > MAX_STALENESS:
        raise ConfigError(
            f"pipeline.max_staleness={own}: must be at most {MAX_STALENESS} to be planned"
        )
    config = read_bounded_config(path, overrides, [own])
    allowed, refused = split_allowed_bounds(config, sorted({own, *parse_bounds(DEFAULT_BOUNDS)}))
    return config, own, allowed, refused


def read_bounded_config(path: Path, overrides: Sequence[str], bounds: Sequence[int]) -> RunConfig:
    """A run under the first of the bounds that it goes with. Raises ConfigError if there is none.

    It generates as far ahead as its bound allows.
    """
    wrong = ConfigError("no bounds")
    for bound in bounds:
        own = [f"pipeline.max_staleness={bound}", "pipeline.depth=null"]
        try:
            return read_config(path, [*overrides, *own])
        except ConfigError as error:
            wrong = error
    raise wrong


def split_allowed_bounds(
    config: RunConfig, bounds: Sequence[int]
) -> tuple[list[int], list[ExcludedBound]]:
    """The bounds that the run's settings go with, wherever it is placed, and why not the others."""
    anywhere = replace(config.placement, mode="disaggregated", pools=[], memory_mb=None)
    allowed, refused = [], []
    for bound in bounds:
        pipeline = replace(config.pipeline, max_staleness=bound)
        try:
            replace(config, pipeline=pipeline, placement=anywhere)
        except ConfigError as error:
            refused.append(ExcludedBound(bound, str(error)))
        else:
            allowed.append(bound)
    return allowed, refused
