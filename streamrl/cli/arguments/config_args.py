"""Arguments that several commands share: the config of a run, and the cluster of a finished run."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.config.run_config import RunConfig, load_config
from streamrl.placement.clusters import Cluster


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=parse_path, metavar="CONFIG", help="YAML file or run directory"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that override the config",
    )


def read_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a config from a YAML file or a run directory, and apply key=value overrides."""
    source = path / "config.yaml" if os.path.isdir(path) else path
    return load_config(source, overrides)


def add_run_cluster_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        type=parse_nonempty,
        metavar="8xH100",
        help="cluster that the run used; not needed for the CPU cores of one machine",
    )


def read_run_cluster(arguments: argparse.Namespace) -> Cluster | None:
    return None if arguments.cluster is None else Cluster.from_text(arguments.cluster)
