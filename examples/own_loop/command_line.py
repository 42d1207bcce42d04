"""Command line that the loops share."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from streamrl.actors.launch.fork_server import start_fork_server
from streamrl.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, OneLineParser
from streamrl.cli.run_setup.signals import INTERRUPTS
from streamrl.config.preflight import check_worker_memory
from streamrl.config.run_config import RunConfig, load_config
from streamrl.errors import ConfigError, StreamError
from streamrl.own_loops.loop import OwnLoop, start_loop
from streamrl.own_loops.model_workers import make_loop_config
from streamrl.own_loops.worker_group import WorkerGroupReply

Step = Sequence[WorkerGroupReply]
"""Replies of a step's updates, the policy's first; each resolves to metrics."""


LoopFunction = Callable[[OwnLoop], Iterator[Step]]


def iter_steps(function: LoopFunction, loop: OwnLoop) -> Iterator[Mapping[str, float]]:
    """Run a loop; yield the metrics of every step, with its duration; the first starts workers."""
    started_at = time.monotonic()
    for step in function(loop):
        metrics: dict[str, float] = {}
        for reply in step:
            metrics |= reply.get()
        yield metrics | {"time/step_s": time.monotonic() - started_at}
        started_at = time.monotonic()
    loop.close()


def make_parser(recipe: str = "", description: str | None = None) -> argparse.ArgumentParser:
    """Declare the command-line options of a loop."""
    parser = OneLineParser(description=description)
    parser.add_argument("--config", default=recipe, help=f"config of a run, YAML ({recipe})")
    parser.add_argument("--steps", type=int, default=30, help="training steps (30)")
    parser.add_argument("--workers", type=int, default=2, help="data-parallel workers (2)")
    parser.add_argument(
        "--turns", action="store_true", default=None, help="let groups compute one after the other"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override settings of the config"
    )
    return parser


def main(function: LoopFunction, recipe: str, *overrides: str) -> None:
    """Run a loop from the command line, printing a line per step."""
    arguments = make_parser(recipe, function.__doc__).parse_intermixed_args()
    start_fork_server()
    # trainer.tensor_parallel must divide the world size.
    ranks = f"trainer.world_size={max(1, arguments.workers)}"
    settings = (ranks, f"run.steps={arguments.steps}", *arguments.overrides)
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        # Check before the loop's overrides apply: they can be invalid for another algorithm.
        check_algorithm(load_config(Path(arguments.config), settings), recipe)
        config = load_config(Path(arguments.config), (*overrides, *settings))
        run_loop(function, config, arguments.workers, takes_turns=arguments.turns)
    except ConfigError as error:
        exit_with_error(str(error), EXIT_BAD_INPUT)
    except StreamError as error:
        exit_with_error(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        exit_with_error("interrupted", EXIT_INTERRUPTED)


def check_algorithm(config: RunConfig, recipe: str) -> None:
    """Raise ConfigError unless the config has the algorithm of the loop's recipe."""
    expected = load_config(Path(recipe)).algorithm.name
    if config.algorithm.name != expected:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: this is a loop of {expected}; other"
            " algorithms need a loop of their own, with their columns"
        )


def run_loop(
    function: LoopFunction, config: RunConfig, workers: int, *, takes_turns: bool | None
) -> None:
    with start_loop(config, workers=workers, takes_turns=takes_turns) as loop:
        INTERRUPTS.install()
        memory = check_worker_memory(make_loop_config(config, workers), on_gpu=loop.on_gpu)
        print(memory.summary_line if memory else "")
        print(f"{config.algorithm.name}: starting {workers} workers of each kind", flush=True)
        has_steps = False
        for metrics in iter_steps(function, loop):
            print(format_step(loop.step, metrics), flush=True)
            has_steps = True
        if not has_steps:
            print(f"{config.run_dir} has all {loop.step} steps: raise --steps, or set run.name")


def format_step(number: int, metrics: Mapping[str, float]) -> str:
    """Format the metrics of a step as a line of text."""
    shown = {
        "reward": ("reward/mean", 3),
        "cost": ("cost/mean", 3),
        "loss": ("loss/policy", 3),
        "value loss": ("loss/value", 3),
        "lagrange": ("dial/lagrange", 3),
        "MB to generate": ("memory/generate_mb", 0),
        "MB to train": ("memory/train_mb", 0),
        "s": ("time/step_s", 3),
    }
    columns = (
        f"{word} {metrics[name]:.{digits}f}"
        for word, (name, digits) in shown.items()
        if name in metrics
    )
    return f"step {number:3d}  " + "  ".join(columns)


def exit_with_error(text: str, code: int) -> None:
    """Print an error line and exit with the code."""
    print(f"own_loop: {text}", file=sys.stderr)
    raise SystemExit(code)
