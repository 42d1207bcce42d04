"""Overlap of the stages: `python -m benchmarks.overlap` prints one JSON object.

- real: the demo's pipeline with max_staleness 0 and 1, against the same pipeline with sequential
  stages (placement.mode=sequential) on the same cores.
- sleeps: 8 generators, 4 scorers and 2 trainers that only sleep, so that cores are no limit.
- empty: engines without work. A step is the cost of the pipeline itself, in seconds and in calls of
  an idle Ray actor.

overlap_efficiency is the busy time of the busiest stage over the step time: at 1 the slowest stage
    never waits.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.actors import start_actor
from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import RECIPE, compute_medians, load_quiet, make_arithmetic, train_run
from benchmarks.timed_engines import TimedEngines
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.placement.config import PlacementConfig

WARM_UP_STEPS = 4
KINDS = ("generate", "score", "train")
BOUNDS = (0, 1)
WORKERS = 14
"""Sleeping engines: generators, scorers and trainers in the ratio 8 : 4 : 2."""


def make_parser() -> BenchmarkParser:
    """Declare the parts and their sizes."""
    parser = BenchmarkParser("overlap", __doc__)
    parser.add_argument("--steps", type=at_least(1), default=20, help="steps of each run")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--bounds", type=at_least(0), nargs="+", default=BOUNDS, help="max_staleness"
    )
    parser.add_argument("--sleepers", type=at_least(1), default=WORKERS, help="workers that sleep")
    parser.set_quick(steps=2, parts=["empty"], bounds=[1], sleepers=3)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the selected parts and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    make_arithmetic()
    return {name: PARTS[name](arguments) for name in arguments.parts}


def measure_real(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure vLLM and DeepSpeed in every mode, and the speed-up over sequential stages."""
    modes = {"sequential": ["placement.mode=sequential", "pipeline.max_staleness=0"]}
    modes |= {name_bound(bound): [f"pipeline.max_staleness={bound}"] for bound in arguments.bounds}
    results = {
        name: measure_run(f"real, {name}", RealEngineFactory(), arguments.steps, mode)
        for name, mode in modes.items()
    }
    baseline = results["sequential"]["step_s"]
    for figures in results.values():
        figures["speed_up"] = baseline / figures["step_s"]
    return results


def measure_sleeps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a stream of sleeping workers that is bound by its generators."""
    engines = TimedEngines(generate_s=0.3, score_s=0.1, train_s=0.006)
    scorers, ranks = max(1, arguments.sleepers * 4 // WORKERS), max(1, arguments.sleepers // 7)
    workers = [
        f"generator.replicas={max(1, arguments.sleepers - scorers - ranks)}",
        "generator.max_concurrent_rollouts=8",
        f"scorer.replicas={scorers}",
        "scorer.max_groups=1",
        f"trainer.world_size={ranks}",
        f"pipeline.groups_per_step={32 * arguments.sleepers // WORKERS}",
        "algorithm.group_size=8",
        "pipeline.micro_batch_tokens=512",
    ]
    return {
        name_bound(bound): measure_run(
            f"sleeps, {name_bound(bound)}",
            engines,
            arguments.steps,
            [*workers, f"pipeline.max_staleness={bound}"],
        )
        for bound in arguments.bounds
    }


def measure_empty(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the pipeline's own cost, in seconds and in round trips of a Ray call."""
    call_s = measure_call()
    results = {
        name_bound(bound): measure_run(
            f"empty, {name_bound(bound)}",
            TimedEngines(),
            4 * arguments.steps,
            [f"pipeline.max_staleness={bound}"],
        )
        for bound in arguments.bounds
    }
    for figures in results.values():
        figures["step_per_call"] = figures["step_s"] / call_s
    return {"call_s": call_s, **results}


PARTS = {"real": measure_real, "sleeps": measure_sleeps, "empty": measure_empty}


def name_bound(bound: int) -> str:
    return f"max_staleness_{bound}"


def measure_call(count: int = 500) -> float:
    """Return the median round trip of a call to an idle Ray actor, in seconds."""
    with connect_cluster(PlacementConfig()):
        actor = start_actor(EchoActor)
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            fetch_reply(actor.echo.remote(), "an idle actor")
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class EchoActor:
    """Asyncio actor without work, in a process of its own like the actors of a run."""

    async def echo(self) -> None:
        pass


def measure_run(
    description: str, engines: RealEngineFactory, steps: int, settings: Sequence[str]
) -> dict[str, Any]:
    """Return medians over the steps of a run, without the first ones."""
    report_progress(f"{description}: {steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.dir={folder}", "run.name=overlap", f"run.steps={steps + WARM_UP_STEPS}"]
        rows = train_run(load_quiet(RECIPE, [*run, *settings]), engines, skip=WARM_UP_STEPS)
    total = sum(row["time/step_s"] for row in rows)
    busy = {kind: sum(row[f"time/{kind}_s"] for row in rows) for kind in KINDS}
    return {
        "steps": len(rows),
        **compute_medians(
            rows, {"step_s": "time/step_s", "tokens_per_s": "throughput/tokens_per_s"}
        ),
        "step_s_mean": total / len(rows),
        "busy_s": {kind: seconds / len(rows) for kind, seconds in busy.items()},
        "overlap_efficiency": max(busy.values()) / total,
    }


if __name__ == "__main__":
    main()
