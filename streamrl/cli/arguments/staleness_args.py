"""Staleness bounds for `streamrl plan`: parses --max-staleness and drops bounds the run forbids.

The planner searches a placement for each bound and ignores the placement in the config.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from streamrl.cli.arguments.config_args import read_config
from streamrl.config.run_config import RunConfig
from streamrl.errors import ConfigError
from streamrl.placement.placements import MAX_STALENESS
from streamrl.placement.search.pareto import ExcludedBound

DEFAULT_BOUNDS = "0,1,2,4"


def parse_bounds(text: str) -> Sequence[int]:
    """Return the staleness bounds in a text such as "0,1,4", sorted.

    Raises ConfigError for malformed text.
    """
    words = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,9}\s*", w) and int(w) <= MAX_STALENESS for w in words):
        raise ConfigError(
            f"--max-staleness {text}: must be numbers from 0 to {MAX_STALENESS}, e.g. 0,1"
        )
    return sorted({int(word) for word in words})


def read_staleness_request(
    arguments: argparse.Namespace,
) -> tuple[RunConfig, int | None, list[int], list[ExcludedBound]]:
    """Return the config to plan, and the staleness bounds for which to plan placements.

    The tuple contains the config, the config's own max_staleness (None if --max-staleness is
    given), the bounds that the other settings allow, and the excluded bounds with their reasons.
    Raises ConfigError for an invalid bound.
    """
    path, overrides = arguments.config, arguments.overrides
    if arguments.max_staleness is not None:
        bounds = parse_bounds(arguments.max_staleness)
        config = read_bounded_config(path, overrides, bounds)
        return config, None, *split_allowed_bounds(config, bounds)
    own_bound = read_config(path, overrides).pipeline.max_staleness
    if own_bound > MAX_STALENESS:
        raise ConfigError(
            f"pipeline.max_staleness={own_bound}: the planner supports at most {MAX_STALENESS}"
        )
    config = read_bounded_config(path, overrides, [own_bound])
    allowed, refused = split_allowed_bounds(
        config, sorted({own_bound, *parse_bounds(DEFAULT_BOUNDS)})
    )
    return config, own_bound, allowed, refused


def read_bounded_config(path: Path, overrides: Sequence[str], bounds: Sequence[int]) -> RunConfig:
    """Load the config under the first of the staleness bounds that its other settings allow.

    Resets pipeline.depth, so that the run generates as far ahead as the bound allows. Raises
    ConfigError if the config allows none of the bounds.
    """
    last_error = ConfigError("no bounds")
    for bound in bounds:
        bound_overrides = [f"pipeline.max_staleness={bound}", "pipeline.depth=null"]
        try:
            return read_config(path, [*overrides, *bound_overrides])
        except ConfigError as error:
            last_error = error
    raise last_error


def split_allowed_bounds(
    config: RunConfig, bounds: Sequence[int]
) -> tuple[list[int], list[ExcludedBound]]:
    """Split staleness bounds into allowed bounds and excluded bounds with their reasons.

    A bound is allowed if a disaggregated run with the config's other settings accepts the bound.
    """
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
