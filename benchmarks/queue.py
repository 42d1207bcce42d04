"""How fast the experience queue is: `python -m benchmarks.queue` prints one JSON object.

Producers put groups of 1 KiB, 64 KiB and 1 MiB, scorers take them and put one more column, a
trainer takes what is complete and acknowledges it; every worker is a process and the clock runs
from the first put to the last acknowledgement. With 1, 2 and 4 shards, without a journal and with
one that is synced at every group commit. In the same run, on the same flow: Ray's queue,
TransferQueue, and memcpy as the limit (benchmarks/queue_peers.py says how each is used).

`ratios` are of the medians, ours with two shards: over each peer in groups/s, over memcpy in MB/s,
and the time with the journal over the time without.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.queue_peers import (
    GROUPS,
    Figures,
    Flow,
    check,
    make_group,
    measure,
    measure_all,
    score,
)
from streamrl.actors.cluster import cluster
from streamrl.actors.shard import RemoteShard, create_shards
from streamrl.buffer import Bounds, ExperienceQueue, Files, Ports, QueueConfig, ShardPlan
from streamrl.messages import ROLLOUT_COLUMNS, Prompt, make_uid
from streamrl.placement import PlacementConfig

STAGES = {
    "generate": Ports((), ROLLOUT_COLUMNS),
    "score": Ports(ROLLOUT_COLUMNS, ("scores",)),
    "train": Ports((*ROLLOUT_COLUMNS, "scores"), ()),
}
QUEUE_BYTES = 512 << 20
WAIT_S = 60.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(GROUPS), help="bytes")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, the median counts")
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--consumers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="groups in one call")
    parser.add_argument("--journal-dir", type=Path, help="where; by default beside this checkout")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args(argv)
    placement = PlacementConfig(cpus=8, object_store_mb=2048)
    with contextlib.redirect_stdout(sys.stderr), cluster(placement, lambda _: []):
        found = {f"{size} bytes": measure_size(size, arguments) for size in arguments.sizes}
    print(json.dumps(found, indent=1))


def measure_size(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures for groups of one size."""
    workers = {"producers": arguments.producers, "consumers": arguments.consumers}
    flow = Flow(size, num_groups=GROUPS[size], batch=arguments.batch, **workers)
    found: dict[str, Any] = {}
    for count in arguments.shards:
        for journal in (False, True):
            name = f"{count} shards, journal {'on' if journal else 'off'}"
            runs = [
                measure_queue(flow, count, journal_dir(arguments) if journal else None)
                for _ in range(arguments.repeats)
            ]
            found[name] = median(runs)
    if arguments.no_peers:
        return found
    peers = measure_all(size, num_groups=GROUPS[size], batch=arguments.batch, **workers)
    return {**found, **peers, "ratios": ratios(found, peers)}


def median(runs: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def ratios(ours: dict[str, Figures], peers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How ours compares, with two shards and the journal off, unless only others were measured."""
    names = [name for name in ours if name.endswith("off")]
    off = next((name for name in names if name.startswith("2 ")), names[0])
    best, kept = ours[off], ours[off.replace("off", "on")]
    found = {
        f"over {name}": best["groups_per_s"] / peer["groups_per_s"]
        for name, peer in peers.items()
        if "groups_per_s" in peer
    }
    found["of memcpy"] = best["mb_per_s"] / peers["memcpy"]["mb_per_s"]
    return found | {"journal's time": best["groups_per_s"] / kept["groups_per_s"]}


def journal_dir(arguments: argparse.Namespace) -> Path:
    """A folder on the disk the checkout is on: a temporary one may be memory."""
    parent = arguments.journal_dir or Path(__file__).resolve().parent.parent / "build"
    parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="journal-", dir=parent))


def measure_queue(flow: Flow, num_shards: int, folder: Path | None) -> Figures:
    """The flow through a queue of its own."""
    bounds = Bounds(1 << 20, QUEUE_BYTES // num_shards)
    config = QueueConfig(shards=num_shards)
    plans = {
        name: ShardPlan(STAGES, config, bounds, files=Files(folder / name) if folder else None)
        for name in (f"shard-{i}" for i in range(num_shards))
    }
    actors: list[Any] = []
    shards = create_shards(plans, keep(actors))
    try:
        return measure(flow, lambda: StreamQueue(shards, flow), {})
    finally:
        for actor in actors:
            ray.kill(actor)
        if folder:
            shutil.rmtree(folder)


def keep(actors: list[Any]) -> Callable[..., Any]:
    """Makes actors and remembers them."""

    def create(name: str, actor_class: Any, arguments: Sequence[Any], *, options: Any) -> Any:
        actors.append(actor_class.options(**options).remote(*arguments))
        return actors[-1]

    return create


class StreamQueue:
    """A worker's client of the queue."""

    def __init__(self, shards: Sequence[RemoteShard], flow: Flow) -> None:
        self._runner = asyncio.Runner()
        self._queue = ExperienceQueue(shards, f"worker-{os.getpid()}")
        self._batch = flow.batch
        self._groups = [make_group(flow.size_bytes) for _ in range(flow.batch)]

    def put(self, numbers: Sequence[int]) -> None:
        """Add the groups of these numbers."""
        for group, number in zip(self._groups, numbers, strict=True):
            group["token_ids"][0] = number
        prompts = [Prompt(make_uid(0, n), g["lengths"]) for n, g in zip(numbers, self._groups)]
        groups = list(zip(prompts, self._groups, strict=True))
        self._runner.run(self._queue.add(groups, 0, stage="generate"))

    def score(self) -> None:
        """Take a batch and commit a column for each."""
        self._runner.run(self._score())

    async def _score(self) -> None:
        left = self._batch
        while left:
            taken = await self._queue.take(
                "score", max_groups=left, columns=ROLLOUT_COLUMNS, wait_s=WAIT_S
            )
            await self._queue.put([(e.lease, {"scores": score(e.columns)}) for e in taken])
            left -= len(taken)

    def train(self) -> list[int]:
        """Take a batch of complete groups, and let them leave."""
        return self._runner.run(self._train())

    async def _train(self) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < self._batch:
            taken = await self._queue.take(
                "train",
                max_groups=self._batch - len(numbers),
                columns=STAGES["train"].needs,
                wait_s=WAIT_S,
            )
            numbers += [check(experience.columns) for experience in taken]
            await self._queue.leave([experience.uid for experience in taken], 0)
        return numbers

    def close(self) -> None:
        """Nothing is left to be done."""


if __name__ == "__main__":
    main()
