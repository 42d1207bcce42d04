"""What the loops stand on: a pool of slots, groups of workers on it, batches, a line per step."""

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
from streamrl.actors.worker_groups.model_workers import (
    TrainedWorker,
    make_engine_env,
    make_loop_config,
    plan_loop_memory,
)
from streamrl.actors.worker_groups.worker_group import (
    ResourcePool,
    WorkerGroup,
    WorkerGroupReply,
    put,
)
from streamrl.cli.main import OneLineParser
from streamrl.cli.run_setup.signals import interrupt_on_signals
from streamrl.config import RunConfig, load_config
from streamrl.config.preflight import prepare_run
from streamrl.controller import BatchRef, WorkerMesh
from streamrl.data import PromptStream
from streamrl.errors import ConfigError, StreamError
from streamrl.resharding import RankGrid

Step = Sequence[WorkerGroupReply]
"""What the updates of a step will tell, the policy's first."""
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
MOST_GROUPS = 8


@dataclass
class Stage:
    """Where a loop runs.

    pool: one slot for each data-parallel worker. max_length: tokens of prompt and completion.
    began: when the step under way did, s on the monotonic clock.
    """

    config: RunConfig
    pool: ResourcePool
    prompts: PromptStream
    max_length: int
    on_gpu: bool = False
    groups: list[WorkerGroup] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def group(self, worker: type, *arguments: object, ranks: int | None = None) -> WorkerGroup:
        """Workers of a class in the first slots, one in every slot unless `ranks` says fewer.

        Those that train are tensor parallel as `trainer` has it; each generates by itself.
        """
        ranks = ranks or self.pool.slots
        split = tensor_parallel(self.config, ranks) if issubclass(worker, TrainedWorker) else 1
        env = make_engine_env(self.config, on_gpu=self.on_gpu)
        mesh = WorkerMesh(
            RankGrid(1, split, ranks // split).assign_ranks(), RankGrid(1, 1, ranks).assign_ranks()
        )
        group = WorkerGroup(self.pool, worker, self.config, *arguments, mesh=mesh, env=env)
        self.groups.append(group)
        return group

    @property
    def batches(self) -> Iterator[BatchRef | WorkerGroupReply]:
        """The prompts of every step, by reference; the first once all workers are there."""
        for group in self.groups:
            group.wait_until_ready()
        for _ in range(self.config.run.steps):
            self.began = time.monotonic()
            yield put({"prompt": self.prompts.draw_prompts(self.config.pipeline.groups_per_step)})


def tensor_parallel(config: RunConfig, ranks: int) -> int:
    """How many of so many ranks share a model. Raises ConfigError if some were left over."""
    split = config.trainer.tensor_parallel
    if ranks % split:
        raise ConfigError(f"trainer.tensor_parallel={split}: must divide --workers={ranks}")
    return split


Loop = Callable[[Stage], Iterator[Step]]


@contextlib.contextmanager
def stage(config: RunConfig, workers: int) -> Iterator[Stage]:
    """A pool of so many slots, on a Ray of its own or the cluster of placement.address.

    Raises ConfigError for settings, data or a cluster that will not do.
    """
    tensor_parallel(config, workers)
    prepared = prepare_run(make_loop_config(config, workers))
    placement = replace(config.placement, cpus=config.placement.cpus or workers)
    with connect_cluster(placement, disaggregated_only) as site:
        pool = ResourcePool(workers, gpus=float(site.has_gpus), groups=MOST_GROUPS)
        yield Stage(config, pool, prepared.prompts, prepared.max_length, site.has_gpus)


def steps_of(loop: Loop, there: Stage) -> Iterator[Mapping[str, float]]:
    """The figures of every step of a loop by name, once it is over, and the seconds it took."""
    for step in loop(there):
        figures: dict[str, float] = {}
        for reply in step:
            figures |= reply.get()
        yield figures | {"time/step_s": time.monotonic() - there.began}
    for group in there.groups:
        group.close()


def make_parser(recipe: str = "", description: str | None = None) -> argparse.ArgumentParser:
    """Declare the options of a loop."""
    parser = OneLineParser(description=description)
    parser.add_argument("--config", default=recipe, help=f"a run's YAML ({recipe})")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (30)")
    parser.add_argument("--workers", type=int, default=2, help="data-parallel workers (2)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the config")
    return parser


def main(loop: Loop, recipe: str, *overrides: str) -> None:
    """Run a loop from the command line; a line for every step."""
    given = make_parser(recipe, loop.__doc__).parse_intermixed_args()
    start_fork_server()
    # Tensor parallelism is checked against them.
    ranks = f"trainer.world_size={max(1, given.workers)}"
    asked = (ranks, f"run.steps={given.steps}", *given.overrides)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        # First as it was given: what the loop sets itself may mean nothing to another algorithm.
        check_algorithm(load_config(Path(given.config), asked), recipe)
        run(loop, load_config(Path(given.config), (*overrides, *asked)), given.workers)
    except ConfigError as error:
        end(str(error), BAD_INPUT)
    except StreamError as error:
        end(str(error), FAILED)
    except KeyboardInterrupt:
        end("interrupted", INTERRUPTED)


def check_algorithm(config: RunConfig, recipe: str) -> None:
    """Raise ConfigError unless the config's algorithm is that of the recipe a loop is made for."""
    own = load_config(Path(recipe)).algorithm.name
    if config.algorithm.name != own:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: this is a loop of {own}, whose columns others"
            " do not have; write one of your own"
        )


def run(loop: Loop, config: RunConfig, workers: int) -> None:
    """Run a loop to its end."""
    if workers < 1:
        raise ConfigError(f"--workers={workers}: must be at least 1")
    with stage(config, workers) as there:
        interrupt_on_signals()
        print(plan_loop_memory(make_loop_config(config, workers), on_gpu=there.on_gpu).summary_line)
        print(f"{config.algorithm.name}: starting {workers} workers of each kind", flush=True)
        for number, figures in enumerate(steps_of(loop, there), 1):
            print(line(number, figures), flush=True)


def line(number: int, figures: Mapping[str, float]) -> str:
    """A step in one line."""
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
    told = (
        f"{word} {figures[name]:.{digits}f}"
        for word, (name, digits) in shown.items()
        if name in figures
    )
    return f"step {number:3d}  " + "  ".join(told)


def end(text: str, code: int) -> None:
    """Leave with one line."""
    print(f"own_loop: {text}", file=sys.stderr)
    raise SystemExit(code)
