"""Setup shared by the loops: a pool, worker groups, batches of prompts, a printed line per step."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.actors.launch.fork_server import start_fork_server
from streamrl.actors.launch.ray_cluster import connect_cluster, disaggregated_only
from streamrl.actors.launch.worker_env import make_hybrid_env
from streamrl.actors.worker_groups.model_workers import TrainedWorker
from streamrl.actors.worker_groups.worker_group import (
    ResourcePool,
    WorkerGroup,
    WorkerGroupReply,
    put,
)
from streamrl.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, OneLineParser
from streamrl.cli.run_setup.signals import interrupt_on_signals
from streamrl.config.own_loop import make_loop_config
from streamrl.config.preflight import check_worker_memory, prepare_run
from streamrl.config.run_config import RunConfig, load_config
from streamrl.controller import BatchRef, WorkerMesh
from streamrl.data.prompt_stream import PromptStream
from streamrl.errors import ConfigError, StreamError
from streamrl.resharding.grids import RankGrid

Step = Sequence[WorkerGroupReply]
"""Replies of a step's updates, the policy's first; each gives metrics."""
MOST_GROUPS = 8


@dataclass
class Stage:
    """Everything a loop runs on.

    pool: a slot per data-parallel worker.
    max_length: maximum tokens of prompt and completion together.
    began: start of the current step, seconds of the monotonic clock.
    """

    config: RunConfig
    pool: ResourcePool
    prompts: PromptStream
    max_length: int
    on_gpu: bool = False
    groups: list[WorkerGroup] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def group(self, worker: type, *arguments: object, ranks: int | None = None) -> WorkerGroup:
        """Start workers of a class in the first `ranks` slots; by default in every slot.

        Workers get config, max_length and then `arguments`. Training ranks are tensor parallel as
        `trainer.tensor_parallel` says; each rank generates alone.
        """
        ranks = ranks or self.pool.slots
        tp_size = tensor_parallel(self.config, ranks) if issubclass(worker, TrainedWorker) else 1
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
        """Prompts of every step, by reference; waits for all workers before the first."""
        for group in self.groups:
            group.wait_until_ready()
        for _ in range(self.config.run.steps):
            self.began = time.monotonic()
            yield put({"prompt": self.prompts.draw_prompts(self.config.pipeline.groups_per_step)})


def tensor_parallel(config: RunConfig, ranks: int) -> int:
    """Return trainer.tensor_parallel. Raises ConfigError unless it divides `ranks`."""
    tp_size = config.trainer.tensor_parallel
    if ranks % tp_size:
        raise ConfigError(f"trainer.tensor_parallel={tp_size}: must divide --workers={ranks}")
    return tp_size


Loop = Callable[[Stage], Iterator[Step]]


@contextlib.contextmanager
def stage(config: RunConfig, workers: int) -> Iterator[Stage]:
    """Make a pool of `workers` slots on a local Ray or on the cluster of placement.address.

    Raises ConfigError for invalid settings or data, or an unsuitable cluster.
    """
    tensor_parallel(config, workers)
    prepared = prepare_run(make_loop_config(config, workers))
    placement = replace(config.placement, cpus=config.placement.cpus or workers)
    with connect_cluster(placement, disaggregated_only) as cluster:
        pool = ResourcePool(workers, gpus=float(cluster.has_gpus), groups=MOST_GROUPS)
        yield Stage(config, pool, prepared.prompts, prepared.max_length, cluster.has_gpus)


def steps_of(loop: Loop, loop_stage: Stage) -> Iterator[Mapping[str, float]]:
    """Run a loop; yield the metrics of every step, with its duration."""
    for step in loop(loop_stage):
        metrics: dict[str, float] = {}
        for reply in step:
            metrics |= reply.get()
        yield metrics | {"time/step_s": time.monotonic() - loop_stage.began}
    for group in loop_stage.groups:
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
        # Without the loop's own overrides, which may be invalid for another algorithm.
        check_algorithm(load_config(Path(arguments.config), settings), recipe)
        run(loop, load_config(Path(arguments.config), (*overrides, *settings)), arguments.workers)
    except ConfigError as error:
        end(str(error), EXIT_BAD_INPUT)
    except StreamError as error:
        end(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        end("interrupted", EXIT_INTERRUPTED)


def check_algorithm(config: RunConfig, recipe: str) -> None:
    """Raise ConfigError unless the config has the algorithm of the loop's recipe."""
    expected = load_config(Path(recipe)).algorithm.name
    if config.algorithm.name != expected:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: this is a loop of {expected}; other"
            " algorithms need a loop of their own, with their columns"
        )


def run(loop: Loop, config: RunConfig, workers: int) -> None:
    if workers < 1:
        raise ConfigError(f"--workers={workers}: must be at least 1")
    with stage(config, workers) as loop_stage:
        interrupt_on_signals()
        memory = check_worker_memory(make_loop_config(config, workers), on_gpu=loop_stage.on_gpu)
        print(memory.summary_line if memory else "")
        print(f"{config.algorithm.name}: starting {workers} workers of each kind", flush=True)
        for number, metrics in enumerate(steps_of(loop, loop_stage), 1):
            print(line(number, metrics), flush=True)


def line(number: int, metrics: Mapping[str, float]) -> str:
    """Format a step as a line."""
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


def end(text: str, code: int) -> None:
    """Print an error line and exit."""
    print(f"own_loop: {text}", file=sys.stderr)
    raise SystemExit(code)
