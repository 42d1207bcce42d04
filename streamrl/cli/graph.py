"""`streamrl graph`: print the model calls of a config and their inputs as text or a graph.

The command reads only the config; model and data need not exist.
"""

import argparse

from streamrl.cli.arguments.config_args import add_config_arguments, read_config
from streamrl.config.run_config import RunConfig
from streamrl.errors import ConfigError
from streamrl.telemetry.drawing.graph_text import DataflowGraph, render_mermaid, render_text
from streamrl.telemetry.progress_line import show_progress

MAX_STEPS = 100  # more steps make an illegible graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl graph CONFIG [key=value ...] [--text | --mermaid] [--steps N]"
    add_config_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print as text (default)")
    form.add_argument("--mermaid", action="store_true", help="print as a Mermaid flowchart")
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="number of training steps to draw (1)"
    )


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.steps <= MAX_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {MAX_STEPS}")
    with show_progress("reading config"):
        config = read_config(arguments.config, arguments.overrides)
    graph = DataflowGraph.from_dataflow(
        config.dataflow,
        name=config.algorithm.name,
        steps=arguments.steps,
        max_staleness=min(config.pipeline.max_steps_ahead, config.pipeline.max_staleness),
    )
    if arguments.mermaid:
        print(render_mermaid(graph), end="")
    else:
        print(render_text(graph, _list_notes(config)), end="")
    return 0


def _list_notes(config: RunConfig) -> list[str]:
    """List facts that the dataflow graph does not show, and likely config mistakes."""
    notes = [
        f"{stage} produces {column}, which no stage requires"
        for stage, column in config.dataflow.unused_columns
    ]
    if (every := config.weights.publish_every) > 1:
        notes.append(f"weights.publish_every={every}: publishes only one in {every} versions")
    if (every := config.reference.every) > 1:
        notes.append(
            f"reference.every={every}: the reference moves only at one in {every} versions"
        )
    return notes
