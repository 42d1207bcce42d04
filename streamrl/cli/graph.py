"""`streamrl graph`: the model calls of a config, and what each waits for, as text, DOT or SVG.

Only the config is read: its model and its data need not be there.
"""

import argparse
import os
from pathlib import Path

from streamrl.cli.arguments.arg_types import named, named_path
from streamrl.cli.output.output_files import write_file
from streamrl.config import RunConfig, load_config
from streamrl.drawing.dataflow_graph import Picture
from streamrl.drawing.graph_svg import svg
from streamrl.drawing.graph_text import dot, text
from streamrl.errors import ConfigError

MOST_STEPS = 100
"""More steps make a picture that nobody can look at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl graph`."""
    parser.usage = "streamrl graph CONFIG [key=value ...] [--text | --dot | --svg FILE] [--steps N]"
    parser.add_argument("config", type=named_path, metavar="CONFIG", help="a YAML file, or a run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override it"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print it as text; this is the default")
    form.add_argument("--dot", action="store_true", help="print it in Graphviz's language")
    form.add_argument(
        "--svg", type=named, metavar="FILE", help="draw it into a file; - prints the drawing"
    )
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="so many optimizer steps of it (1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if not 1 <= arguments.steps <= MOST_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {MOST_STEPS}")
    path: Path = arguments.config
    source = path / "config.yaml" if os.path.isdir(path) else path
    config = load_config(source, arguments.overrides)
    picture = Picture.of(
        config.dataflow,
        name=config.algorithm.name,
        steps=arguments.steps,
        max_staleness=min(config.pipeline.lead, config.pipeline.max_staleness),
    )
    if arguments.svg is None:
        shown = dot(picture) if arguments.dot else text(picture, _notes(config))
        print(shown, end="")
    elif arguments.svg == "-":
        print(svg(picture), end="")
    else:
        write_file("--svg", Path(arguments.svg), svg(picture))
        print(f"{arguments.svg}: {picture.title}")
    return 0


def _notes(config: RunConfig) -> list[str]:
    """What the graph cannot show, or shows and may be a slip."""
    notes = [
        f"{stage} produces {column}, which no stage needs"
        for stage, column in config.dataflow.unconsumed
    ]
    if (every := config.weights.publish_every) > 1:
        notes.append(f"weights.publish_every={every}: only one in {every} versions is published")
    if (every := config.reference.every) > 1:
        notes.append(f"reference.every={every}: it only moves at one in {every} versions")
    return notes
