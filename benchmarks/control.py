"""Cost of control at scale: `python -m benchmarks.control` prints one JSON object.

Coordinator, queue and weight registry of a run with empty engines, by groups in a training step.

- virtual: the real code in one process on a virtual clock, CPU time by part: `coordinator`
  (admission, step assembly, schedule, metrics, reports), `queue` (a shard), `weights` (requests of
  the generators for versions), `replicas` (all generators, scorers and ranks).
  `largest_over_smallest` compares the cost of a group in coordinator and queue. For scale: a bare
  asyncio task in the same process.
- ray: actors, journals and messages, with many empty generators in a process. A group's time,
  end to end, in round trips of a bare Ray call.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import ray

from benchmarks.actors import start_actor, wait_for_all
from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.empty_run import (
    COORDINATOR,
    GENERATE_CALL,
    QUEUE,
    WEIGHTS,
    EmptyRank,
    EmptyReplica,
    EndlessPrompts,
    RunShape,
    find_train_call,
    get_stages,
    make_context,
    run_virtual_steps,
)
from benchmarks.overlap import EchoActor
from benchmarks.runs import RECIPE, load_quiet
from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.coordination.coordinator import CoordinatorActor
from streamrl.actors.coordination.driver_events import StepReport
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.actors.queue_shard import create_shards
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.buffer import ShardCapacity, ShardFiles, ShardPlan
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import REWARD_CALL, ModelCall
from streamrl.placement.config import PlacementConfig
from streamrl.planner.simulator.virtual_loop import run_virtual

GROUPS = (32, 128, 512, 2048, 4096)
MEASURED_GROUPS = 256
"""Fewest groups to measure: small steps are repeated."""
RUN_S = 900.0
GENERATORS_PER_PROCESS = 32
CALLS = 2000
TASKS = 20_000


def make_parser() -> BenchmarkParser:
    """Declare the parts and their sizes."""
    parser = BenchmarkParser("control", __doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--groups", type=at_least(1), nargs="+", default=GROUPS, help="in a step")
    parser.add_argument("--generators", type=at_least(1), default=512)
    parser.add_argument("--rollouts", type=at_least(1), default=4, help="in a group")
    parser.add_argument("--filtered", type=float, default=0.0, help="fraction of the groups")
    parser.add_argument("--ray-groups", type=at_least(1), default=512, help="in a step, on Ray")
    parser.add_argument("--ray-generators", type=at_least(1), default=128)
    parser.set_quick(parts=["virtual"], groups=[8, 32], generators=8)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the selected parts and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: PARTS[name](arguments) for name in arguments.parts}


def load_run(folder: str, shape: RunShape, *settings: str) -> RunConfig:
    """Load the config of a run in a folder, and make the run directory."""
    config = load_quiet(
        RECIPE,
        [
            f"run.dir={folder}",
            "run.name=control",
            f"run.steps={shape.steps + 2}",
            f"pipeline.groups_per_step={shape.groups_per_step}",
            f"algorithm.group_size={shape.rollouts}",
            f"generator.replicas={shape.generators}",
            f"scorer.replicas={shape.scorers}",
            f"trainer.world_size={shape.ranks}",
            *settings,
        ],
    )
    config.run_dir.mkdir(parents=True)
    return config


def make_shape(arguments: argparse.Namespace, groups: int, generators: int) -> RunShape:
    """Make a shape whose generators have room for the groups of two steps."""
    steps = 1 if arguments.quick else max(1, MEASURED_GROUPS // groups)
    slots = -(-2 * groups // generators)
    return RunShape(
        groups,
        generators,
        slots,
        steps,
        rollouts=arguments.rollouts,
        filtered=arguments.filtered,
    )


def measure_virtual(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every number of groups in this process."""
    sizes = {}
    for groups in arguments.groups:
        sizes[f"{groups} groups"] = measure_size(
            make_shape(arguments, groups, arguments.generators)
        )
        report_progress(f"{groups} groups: {sizes[f'{groups} groups']}")
    costs = [size["us_per_group"] for size in sizes.values()]
    smallest, largest = (cost[COORDINATOR] + cost[QUEUE] for cost in (costs[0], costs[-1]))
    return {
        "generators": arguments.generators,
        "rollouts_per_group": arguments.rollouts,
        **sizes,
        "largest_over_smallest": largest / smallest,
        "task_us": 1e6 * asyncio.run(measure_task()),
    }


def measure_size(shape: RunShape) -> dict[str, Any]:
    """Return the cost of a group by part, and what a core of coordinator or shard can serve."""
    filtering = ["filter.oversample=null", "algorithm.name=dapo"] if shape.filtered else []
    with tempfile.TemporaryDirectory() as folder:
        config = load_run(folder, shape, "queue.journal.enabled=false", *filtering)
        cost = run_virtual(run_virtual_steps(config, shape, config.run_dir))
    groups = shape.steps * shape.groups_per_step
    per_group = {part: 1e6 * seconds / groups for part, seconds in sorted(cost.seconds.items())}
    requests = cost.calls[WEIGHTS]
    return {
        "steps": shape.steps,
        "us_per_group": per_group,
        "us_per_weight_request": 1e6 * cost.seconds[WEIGHTS] / requests,
        "weight_requests_per_generator_s": requests / shape.generators / cost.virtual_s,
        "shard_calls_per_group": cost.calls[QUEUE] / groups,
        "log_writes_per_group": cost.num_writes / groups,
        "coordinator_groups_per_s": 1e6 / (per_group[COORDINATOR] + per_group[WEIGHTS]),
        "shard_groups_per_s": 1e6 / per_group[QUEUE],
    }


async def measure_task() -> float:
    """Return the CPU seconds of a bare asyncio task, from its creation to its result."""

    async def do_nothing() -> None:
        pass

    start = time.thread_time()
    for _ in range(TASKS):
        await asyncio.create_task(do_nothing())
    return (time.thread_time() - start) / TASKS


class ReplicaHost:
    """Actor that hosts many replicas of a role."""

    def __init__(self) -> None:
        self._replicas: list[EmptyReplica] = []

    async def run(
        self, context: ActorContext, shape: RunShape, call: ModelCall, indices: Sequence[int]
    ) -> None:
        self._replicas = [EmptyReplica(context, shape, call, index) for index in indices]
        await asyncio.gather(*(replica.run() for replica in self._replicas))

    async def collect_report(self) -> ActorReport:
        reports = [await replica.collect_report() for replica in self._replicas]
        return ActorReport("host", tuple(chain.from_iterable(one.spans for one in reports)))


def measure_ray(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure groups per second through actors, and the round trip of a bare call."""
    groups, generators = arguments.ray_groups, arguments.ray_generators
    shape = make_shape(arguments, groups, generators)
    shape = RunShape(
        groups,
        generators,
        shape.slots,
        steps=max(4, shape.steps),
        rollouts=arguments.rollouts,
        ranks=1,
        scorers=1,
        pull_s=0.0,
        generate_s=(0.0, 0.0),
        train_s=0.0,
    )
    with (
        connect_cluster(PlacementConfig(object_store_mb=256)),
        tempfile.TemporaryDirectory() as folder,
    ):
        call_s, calls_per_s = measure_calls()
        rows = run_on_ray(load_run(folder, shape), shape)
    step_s = statistics.median(row["time/step_s"] for row in rows)
    groups_per_s = groups / step_s
    return {
        "generators": generators,
        "groups_per_step": groups,
        "rollouts_per_group": arguments.rollouts,
        "steps": len(rows),
        "groups_per_s": groups_per_s,
        "call_s": call_s,
        "calls_per_s": calls_per_s,
        "group_over_call": 1 / groups_per_s / call_s,
    }


def measure_calls() -> tuple[float, float]:
    """Return the median round trip of a call to an idle actor, s, and calls per second at once."""
    actor = start_actor(EchoActor)
    seconds = []
    for _ in range(CALLS // 4):
        start = time.perf_counter()
        fetch_reply(actor.echo.remote(), "an idle actor", RUN_S)
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    fetch_reply([actor.echo.remote() for _ in range(CALLS)], "an idle actor", RUN_S)
    calls_per_s = CALLS / (time.perf_counter() - start)
    ray.kill(actor)
    return statistics.median(seconds), calls_per_s


def run_on_ray(config: RunConfig, shape: RunShape) -> list[Any]:
    """Run a shape on actors; return the metrics rows without those of the first two steps."""
    capacity, files = ShardCapacity(config.capacity_groups), ShardFiles(config.run_dir / "shard")
    plan = ShardPlan(get_stages(config), config.queue, capacity, "one", files)
    shards = create_shards({"shard-0": plan})
    coordinator = start_actor(CoordinatorActor)
    context = make_context(config, config.run_dir, shards, coordinator)
    train_call = find_train_call(config)
    rank = start_actor(EmptyRank, shards, "policy-0", shape, train_call.needs)
    calls = {call.stage: call for call in config.dataflow.calls}
    generate, reward = calls[GENERATE_CALL.stage], calls[REWARD_CALL.stage]
    hosts = [
        (generate, range(first, min(first + GENERATORS_PER_PROCESS, shape.generators)))
        for first in range(0, shape.generators, GENERATORS_PER_PROCESS)
    ] + [(reward, range(shape.scorers))]
    actors = [start_actor(ReplicaHost) for _ in hosts]
    roles = [
        RoleActors([train_call], ["policy-0"], [rank]),
        RoleActors([generate], [f"host-{i}" for i in range(len(hosts) - 1)], actors[:-1]),
        RoleActors([reward], ["scorer-host"], actors[-1:]),
    ]
    start = coordinator.start.remote(context, roles, EndlessPrompts(), {}, None)
    fetch_reply(start, "coordinator.start", RUN_S)
    loops = [
        actor.run.remote(context, shape, call, indices)
        for actor, (call, indices) in zip(actors, hosts, strict=True)
    ]
    description = f"{shape.steps + 2} steps of {shape.groups_per_step} groups"
    wait_for_all([coordinator.run.remote()], description, timeout_s=RUN_S, beside=loops)
    reports = fetch_reply(coordinator.read_reports.remote(0, 1.0), "coordinator.read_reports")
    for actor in (*actors, rank, coordinator, *(shard.actor for shard in shards)):
        ray.kill(actor)
    return [report.row for report in reports if isinstance(report, StepReport)][2:]


PARTS = {"virtual": measure_virtual, "ray": measure_ray}


if __name__ == "__main__":
    main()
