"""Setup that the loops share: device pool, worker groups, prompts and the command line."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.actors.launch.actor_registry import make_hybrid_env
from streamrl.actors.launch.fork_server import start_fork_server
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, OneLineParser
from streamrl.cli.run_setup.signals import INTERRUPTS
from streamrl.config.preflight import check_worker_memory, prepare_run
from streamrl.config.run_config import RunConfig, load_config
from streamrl.data.prompt_stream import PromptStream
from streamrl.errors import ConfigError, StreamError
from streamrl.own_loops import BatchRef, WorkerMesh
from streamrl.own_loops.model_workers import TrainedWorker, make_loop_config
from streamrl.own_loops.worker_group import (
    ResourcePool,
    WorkerGroup,
    WorkerGroupReply,
    put,
)
from streamrl.resharding.grids import RankGrid

Step = Sequence[WorkerGroupReply]
"""Replies of a step's updates, the policy's first; each resolves to metrics."""
MAX_GROUPS = 8


@dataclass
class LoopSetup:
    """Setup of a loop: config, devices, prompts and the worker groups that it has started.

    pool: a slot per data-parallel worker.
    max_length: maximum tokens of prompt and completion together.
    step_started_at: start of the current step, seconds of the monotonic clock.
    """

    config: RunConfig
    pool: ResourcePool
    prompts: PromptStream
    max_length: int
    on_gpu: bool = False
    groups: list[WorkerGroup] = field(default_factory=list)
    step_started_at: float = field(default_factory=time.monotonic)

    def start_group(
        self, worker: type, *arguments: object, ranks: int | None = None
    ) -> WorkerGroup:
        """Start workers of a class in the first `ranks` slots; by default in every slot.

        Workers get config, max_length and then `arguments`. Training ranks are tensor parallel as
        `trainer.tensor_parallel` says; each rank generates alone.
        """
        ranks = ranks or self.pool.slots
        is_trained = issubclass(worker, TrainedWorker)
        tp_size = get_tensor_parallel(self.config, ranks) if is_trained else 1
        env = make_hybrid_env(self.config, on_gpu=self.on_gpu)
        mesh = WorkerMesh(
            RankGrid(1, tp_size, ranks // tp_size).assign_ranks(),
            RankGrid(1, 1, ranks).assign_ranks(),
        )
        settings = (self.config, self.max_length, *arguments)
        group = WorkerGroup(self.pool, worker, *settings, mesh=mesh, env=env)
        self.groups.append(group)
        return group

    @property
    def batches(self) -> Iterator[BatchRef | WorkerGroupReply]:
        """Prompts of each step, by reference; waits for all workers before the first."""
        for group in self.groups:
            group.wait_until_ready()
        for _ in range(self.config.run.steps):
            self.step_started_at = time.monotonic()
            yield put({"prompt": self.prompts.draw_prompts(self.config.pipeline.groups_per_step)})


def get_tensor_parallel(config: RunConfig, ranks: int) -> int:
    """Return trainer.tensor_parallel. Raises ConfigError unless it divides `ranks`."""
    tp_size = config.trainer.tensor_parallel
    if ranks % tp_size:
        raise ConfigError(f"trainer.tensor_parallel={tp_size}: must divide --workers={ranks}")
    return tp_size


Loop = Callable[[LoopSetup], Iterator[Step]]


@contextlib.contextmanager
def make_loop_setup(config: RunConfig, workers: int) -> Iterator[LoopSetup]:
    """Yield a setup with `workers` slots on a local Ray or the cluster of placement.address.

    Raises ConfigError for invalid settings or data, or an unsuitable cluster.
    """
    get_tensor_parallel(config, workers)
    prepared = prepare_run(make_loop_config(config, workers))
    placement = replace(config.placement, cpus=config.placement.cpus or workers)
    with connect_cluster(placement) as cluster:
        pool = ResourcePool(workers, gpus=float(cluster.has_gpus), groups=MAX_GROUPS)
        yield LoopSetup(config, pool, prepared.prompts, prepared.max_length, cluster.has_gpus)


def iter_steps(loop: Loop, setup: LoopSetup) -> Iterator[Mapping[str, float]]:
    """Run a loop; yield the metrics of every step, with its duration."""
    for step in loop(setup):
        metrics: dict[str, float] = {}
        for reply in step:
            metrics |= reply.get()
        yield metrics | {"time/step_s": time.monotonic() - setup.step_started_at}
    for group in setup.groups:
        group.close()


def make_parser(recipe: str = "", description: str | None = None) -> argparse.ArgumentParser:
    """Declare the command-line options of a loop."""
    parser = OneLineParser(description=description)
    parser.add_argument("--config", default=recipe, help=f"config of a run, YAML ({recipe})")
    parser.add_argument("--steps", type=int, default=30, help="training steps (30)")
    parser.add_argument("--workers", type=int, default=2, help="data-parallel workers (2)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override settings of the config"
    )
    return parser


def main(loop: Loop, recipe: str, *overrides: str) -> None:
    """Run a loop from the command line, printing a line per step."""
    arguments = make_parser(recipe, loop.__doc__).parse_intermixed_args()
    start_fork_server()
    # trainer.tensor_parallel must divide the world size.
    ranks = f"trainer.world_size={max(1, arguments.workers)}"
    settings = (ranks, f"run.steps={arguments.steps}", *arguments.overrides)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        # Check before the loop's overrides apply: they can be invalid for another algorithm.
        check_algorithm(load_config(Path(arguments.config), settings), recipe)
        config = load_config(Path(arguments.config), (*overrides, *settings))
        run_loop(loop, config, arguments.workers)
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


def run_loop(loop: Loop, config: RunConfig, workers: int) -> None:
    if workers < 1:
        raise ConfigError(f"--workers={workers}: must be at least 1")
    with make_loop_setup(config, workers) as setup:
        INTERRUPTS.install()
        memory = check_worker_memory(make_loop_config(config, workers), on_gpu=setup.on_gpu)
        print(memory.summary_line if memory else "")
        print(f"{config.algorithm.name}: starting {workers} workers of each kind", flush=True)
        for number, metrics in enumerate(iter_steps(loop, setup), 1):
            print(format_step(number, metrics), flush=True)


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
