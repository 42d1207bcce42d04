"""`streamrl graph`: the model calls of a config, and what each waits for, as text, DOT or SVG.

Only the config is read: its model and its data need not be there.
"""

import argparse
import os
from pathlib import Path

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output.output_files import write_output_file
from streamrl.config import RunConfig, load_config
from streamrl.drawing.dataflow_graph import DataflowGraph
from streamrl.drawing.graph_svg import render_svg
from streamrl.drawing.graph_text import render_dot, render_text
from streamrl.errors import ConfigError

MAX_STEPS = 100
"""More steps make a picture that nobody can look at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl graph`."""
    parser.usage = "streamrl graph CONFIG [key=value ...] [--text | --dot | --svg FILE] [--steps N]"
    parser.add_argument("config", type=parse_path, metavar="CONFIG", help="a YAML file, or a run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override it"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print it as text; this is the default")
    form.add_argument("--dot", action="store_true", help="print it in Graphviz's language")
    form.add_argument(
        "--svg",
        type=parse_nonempty,
        metavar="FILE",
        help="draw it into a file; - prints the drawing",
    )
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="so many optimizer steps of it (1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if not 1 <= arguments.steps <= MAX_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {MAX_STEPS}")
    path: Path = arguments.config
    source = path / "config.yaml" if os.path.isdir(path) else path
    config = load_config(source, arguments.overrides)
    picture = DataflowGraph.from_dataflow(
        config.dataflow,
        name=config.algorithm.name,
        steps=arguments.steps,
        max_staleness=min(config.pipeline.max_steps_ahead, config.pipeline.max_staleness),
    )
    if arguments.svg is None:
        shown = render_dot(picture) if arguments.dot else render_text(picture, _list_notes(config))
        print(shown, end="")
    elif arguments.svg == "-":
        print(render_svg(picture), end="")
    else:
        write_output_file("--svg", Path(arguments.svg), render_svg(picture))
        print(f"{arguments.svg}: {picture.title}")
    return 0


def _list_notes(config: RunConfig) -> list[str]:
    """What the graph cannot show, or shows and may be a slip."""
    notes = [
        f"{stage} produces {column}, which no stage needs"
        for stage, column in config.dataflow.unused_columns
    ]
    if (every := config.weights.publish_every) > 1:
        notes.append(f"weights.publish_every={every}: only one in {every} versions is published")
    if (every := config.reference.every) > 1:
        notes.append(f"reference.every={every}: it only moves at one in {every} versions")
    return notes
