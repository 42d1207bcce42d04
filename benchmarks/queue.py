"""Throughput of the experience queue: `python -m benchmarks.queue` prints one JSON object.

Producers admit prompts, lease them and commit groups of 1 KiB, 64 KiB and 1 MiB; scorers lease
these and commit one more column; a trainer leases complete groups and removes them. Every worker is
a process; the clock runs from the first admission to the last removal. Variants: 1, 2 and 4 shards,
without a journal and with a journal that is synced at every group commit. For comparison, on the
same flow: Ray's queue, TransferQueue, and memcpy as the limit (see benchmarks/queue_peers.py).

All variants are measured in turn, round by round, so that a change of the machine's speed affects
all of them. Results are medians over the rounds. `ratios` are medians of the per-round ratios, ours
without a journal at its fastest number of shards: over each peer in groups/s, over memcpy in MB/s,
and the time with the journal over the time without.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from benchmarks.actors import start_actor, wait_for_all
from benchmarks.command import (
    ROOT,
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
)
from benchmarks.peers import measure_peer
from benchmarks.queue_peers import (
    FLOW_S,
    check_group,
    compute_scores,
    make_group,
    measure_memcpy,
    measure_ray_queue,
    measure_transfer_queue,
    set_numbers,
)
from streamrl import pipeline
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.actors.queue_shard import RemoteShard, create_shards
from streamrl.buffer import (
    ExperienceQueue,
    QueueConfig,
    ShardCapacity,
    ShardFiles,
    ShardPlan,
    StageSchema,
)
from streamrl.errors import ConfigError
from streamrl.messages import ROLLOUT_COLUMNS, Experience, Prompt, make_uid, parse_uid
from streamrl.placement.config import PlacementConfig
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import StageContext
from streamrl.stream.stage_worker import ConcurrencyLimit, InFlightWork, StageResult
from streamrl.telemetry.spans import SpanRecorder

GROUPS = {1 << 10: 8192, 1 << 16: 2048, 1 << 20: 512}
"""Bytes of a group, and number of groups."""
STAGES = {
    "generate": StageSchema((), ROLLOUT_COLUMNS),
    "score": StageSchema(ROLLOUT_COLUMNS, ("scores",)),
    "train": StageSchema((*ROLLOUT_COLUMNS, "scores"), ()),
}
QUEUE_BYTES = 512 << 20
WAIT_S = 60.0

Figures = dict[str, float]


def make_parser() -> BenchmarkParser:
    """Declare sizes, workers and peers."""
    parser = BenchmarkParser("queue", __doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(GROUPS), choices=GROUPS, help="bytes"
    )
    parser.add_argument("--share", type=at_least(1), default=1, help="use one in SHARE groups")
    parser.add_argument("--shards", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="rounds; the result is their median"
    )
    parser.add_argument("--producers", type=at_least(1), default=2)
    parser.add_argument("--consumers", type=at_least(1), default=2)
    parser.add_argument("--batch", type=at_least(1), default=32, help="groups in one call")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS, help="none if empty")
    parser.set_quick(sizes=[1 << 10], share=128, shards=[1], repeats=1, batch=8)
    parser.set_quick(producers=1, consumers=1, peers=["ray_queue_batch", "memcpy"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the selected variants and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every size. Raises ConfigError if batches and workers do not divide the groups."""
    for size in arguments.sizes:
        count = GROUPS[size] // arguments.share
        round_of = arguments.batch * math.lcm(arguments.producers, arguments.consumers)
        if count < 8 or count % round_of:
            raise ConfigError(
                f"--share={arguments.share} --batch={arguments.batch}: {count} groups of {size}"
                f" bytes; must be 8 or more, and whole batches for each worker, {round_of} at once"
            )
    with connect_cluster(PlacementConfig(cpus=8, object_store_mb=2048)):
        return {f"{size} bytes": measure_size(size, arguments) for size in arguments.sizes}


def measure_size(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all variants for groups of one size."""
    workers = {"producers": arguments.producers, "consumers": arguments.consumers}
    count = GROUPS[size] // arguments.share
    many: dict[str, Any] = {"num_groups": count, "batch": arguments.batch, **workers}
    few: dict[str, Any] = {"num_groups": count // 8, "batch": 1, **workers}
    queue_names = {
        f"{shards} shards, journal {'on' if journal else 'off'}": partial(
            stream_queue, size, shards=shards, journal=journal, **many
        )
        for shards in arguments.shards
        for journal in (False, True)
    }
    others = {
        "ray_queue": partial(measure_peer, partial(measure_ray_queue, size, **few)),
        "ray_queue_batch": partial(measure_peer, partial(measure_ray_queue, size, **many)),
        "ray_queue_references": partial(
            measure_peer, partial(measure_ray_queue, size, references=True, **many)
        ),
        "transfer_queue": partial(measure_peer, partial(measure_transfer_queue, size, **many)),
        "memcpy": partial(measure_memcpy, size),
    }
    peers = {name: others[name] for name in arguments.peers}
    rounds = []
    for turn in range(arguments.repeats):
        results = {}
        for name, measure_one in (queue_names | peers).items():
            results[name] = measure_one()
            report_progress(f"{size} bytes, round {turn + 1}, {name}: {results[name]}")
        rounds.append(results)
    figures = {name: compute_medians([one[name] for one in rounds]) for name in queue_names | peers}
    off = max(
        (n for n in queue_names if n.endswith("off")), key=lambda n: figures[n]["groups_per_s"]
    )
    return {
        **figures,
        "ratios": compute_medians([compute_ratios(one, off, peers) for one in rounds]),
    }


PEERS = ("ray_queue", "ray_queue_batch", "ray_queue_references", "transfer_queue", "memcpy")


def compute_medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each result over the rounds, without failed rounds."""
    failed = [one for one in rounds if "error" in one]
    if failed:
        return failed[0]
    names = set.intersection(*map(set, rounds))
    return {n: statistics.median(one[n] for one in rounds) for n in rounds[0] if n in names}


def compute_ratios(results: dict[str, Figures], off: str, peers: Collection[str]) -> Figures:
    """Return the ratios of one round: ours over each peer; the journal's time over the time
    without."""
    ours, kept = results[off], results[off.replace("off", "on")]
    over = {
        f"over {name}": ours["groups_per_s"] / results[name]["groups_per_s"]
        for name in peers
        if "groups_per_s" in results[name]
    }
    if "memcpy" in peers:
        over["of memcpy"] = ours["mb_per_s"] / results["memcpy"]["mb_per_s"]
    return {**over, "journal's time": ours["groups_per_s"] / kept["groups_per_s"]}


def stream_queue(
    size: int, *, shards: int, journal: bool, num_groups: int, batch: int, **workers: int
) -> Figures:
    """Measure the flow through an experience queue; its journal lies beside this checkout."""
    # Not in the system's temporary folder, which can be in memory: measure a disk.
    parent = ROOT / "build"
    parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="journal-", dir=parent))
    config, bounds = QueueConfig(shards=shards), ShardCapacity(1 << 20, QUEUE_BYTES // shards)
    plans = {
        name: ShardPlan(
            STAGES, config, bounds, files=ShardFiles(folder / name) if journal else None
        )
        for name in (f"shard-{i}" for i in range(shards))
    }
    faces = create_shards(plans)
    makers = {"put": workers["producers"], "score": workers["consumers"], "train": 1}
    members = {
        stage: [start_actor(FlowMember, faces, f"{stage}-{i}", size, batch) for i in range(count)]
        for stage, count in makers.items()
    }
    try:
        working = [scorer.score.remote() for scorer in members["score"]]
        working += [producer.generate.remote() for producer in members["put"]]
        run_flow(members, working, range(num_groups, num_groups + 8 * batch))
        rate = num_groups / run_flow(members, working, range(num_groups))
    finally:
        for actor in (*chain(*members.values()), *(face.actor for face in faces)):
            ray.kill(actor)
        shutil.rmtree(folder)
    return {"groups_per_s": rate, "mb_per_s": rate * size / 1e6}


def run_flow(members: dict[str, list[Any]], working: Sequence[Any], numbers: range) -> float:
    """Run the flow once; return the seconds from the first admission to the last removal."""
    (trainer,), producers = members["train"], members["put"]
    trained = trainer.train.remote(len(numbers))
    starts = [p.put.remote(numbers[i :: len(producers)]) for i, p in enumerate(producers)]
    description = f"the flow of {len(numbers)} groups"
    (end, arrived), *started = wait_for_all(
        [trained, *starts], description, timeout_s=FLOW_S, beside=working
    )
    if sorted(arrived) != list(numbers):
        raise BenchmarkError(f"{description}: {len(arrived)} arrived, or others")
    return float(end - min(started))


class FlowMember:
    """Actor of the flow with its own queue client."""

    def __init__(self, shards: Sequence[RemoteShard], name: str, size: int, batch: int) -> None:
        self._name = name
        self._queue = ExperienceQueue(shards, name)
        self._groups = [make_group(size) for _ in range(batch)]
        self._batch = batch

    async def put(self, numbers: Sequence[int]) -> float:
        """Put the prompts with these numbers; return the start time."""
        start = time.monotonic()
        for first in range(0, len(numbers), self._batch):
            uids = [make_uid(0, number) for number in numbers[first : first + self._batch]]
            prompts = [Prompt(uid, self._groups[0]["lengths"]) for uid in uids]
            await self._queue.insert_prompts(prompts, 0)
        return start

    async def generate(self) -> None:
        """Commit rollouts for prompts until the actor is killed, as a generator of a run does."""
        while True:
            leased = await self._queue.lease_groups(
                "generate", max_groups=self._batch, columns=(), wait_s=WAIT_S
            )
            numbers = [parse_uid(experience.uid)[1] for experience in leased]
            columns = set_numbers(self._groups[: len(numbers)], numbers)
            leases = [experience.lease for experience in leased]
            await self._queue.commit_columns(list(zip(leases, columns, strict=True)))

    async def score(self) -> None:
        """Score groups until the actor is killed, as a scorer of a run does."""

        async def judge(experiences: Sequence[Experience]) -> Sequence[StageResult]:
            return [compute_scores(dict(experience.columns)) for experience in experiences]

        stage = StageContext("score", self._queue, DedicatedDeviceLease(), SpanRecorder(self._name))
        in_flight = InFlightWork(ConcurrencyLimit(2 * self._batch))
        await pipeline.score_groups(stage, judge, ROLLOUT_COLUMNS, in_flight, self._batch)

    async def train(self, count: int) -> tuple[float, list[int]]:
        """Lease this many complete groups and remove them; return the end time and the groups."""
        done: list[int] = []
        while len(done) < count:
            taken = await self._queue.lease_groups(
                "train",
                max_groups=min(self._batch, count - len(done)),
                columns=STAGES["train"].needs,
                wait_s=WAIT_S,
            )
            done += [check_group(dict(experience.columns)) for experience in taken]
            await self._queue.remove_groups([experience.uid for experience in taken], 0)
        return time.monotonic(), done


if __name__ == "__main__":
    main()
