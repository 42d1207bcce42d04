"""Peers on the flow of `benchmarks.queue`: Ray's queue, TransferQueue, and memcpy.

Producers put groups; scorers take groups, read every column and add `scores`; a trainer takes
complete groups, reads every column and removes them. Each is a Ray actor; the clock runs from the
first put to the last removal; MB are 10^6 bytes. Ray's queue: two unbounded queues in a row.
TransferQueue: default storage, polled as in its streaming tutorial, a row per group. To favor the
peers, batches are laid out before the clock starts and only renumbered after.
"""

import os
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import ray
import xxhash
from ray.util.queue import Empty, Queue

from benchmarks.actors import start_actor, wait_for_all
from benchmarks.command import BenchmarkError
from benchmarks.peers import find_parity_packages
from streamrl.messages import COLUMN_SPECS, ROLLOUT_COLUMNS, Array, ColumnAxis

ROLLOUTS = 8
POLL_S = 0.02  # pause of a consumer after a partial batch: batch calls do not block
FLOW_S = 120.0
"""Timeout of one measurement."""
Group = dict[str, Array]
Stages = dict[str, Callable[[Sequence[int]], Any]]


def measure_ray_queue(
    size_bytes: int,
    *,
    num_groups: int,
    producers: int,
    consumers: int,
    batch: int,
    references: bool = False,
) -> dict[str, float]:
    """Measure Ray's queue: with batch calls if batch > 1, or with only a reference to each
    batch."""
    queues = [Queue(actor_options={"num_cpus": 0}) for _ in range(2)]
    make = partial(make_queue_stages, size_bytes, batch, references, *queues)
    rate = measure(make, np.arange(num_groups).reshape(-1, batch), producers, consumers, {})
    return {"groups_per_s": rate, "mb_per_s": rate * size_bytes / 1e6}


def measure_transfer_queue(
    size_bytes: int, *, num_groups: int, producers: int, consumers: int, batch: int
) -> dict[str, float]:
    """Measure TransferQueue, which takes three CPUs of the cluster. Raises BenchmarkError."""
    packages = str(find_parity_packages("transfer_queue"))
    path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    # The default of 8 copy threads per process is slower with few cores.
    env = {"PYTHONPATH": path, "TQ_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 8))}
    make = partial(make_row_stages, size_bytes, batch)
    rate = measure(make, np.arange(num_groups).reshape(-1, batch), producers, consumers, env)
    return {"groups_per_s": rate, "mb_per_s": rate * size_bytes / 1e6}


def measure_memcpy(size_bytes: int) -> dict[str, float]:
    """Measure copies of buffers of the group's size, more of them than fit into a cache."""
    shape = ((256 << 20) // size_bytes, size_bytes)
    pairs = list(zip(np.zeros(shape, np.uint8), np.ones(shape, np.uint8), strict=True))

    def copy() -> None:
        for pair in pairs:
            np.copyto(*pair)

    seconds = timeit.repeat(copy, number=1, repeat=5)
    return {"mb_per_s": shape[0] * shape[1] / float(np.median(seconds)) / 1e6}


def measure(
    make: Callable[[], Stages], batches: Array, producers: int, consumers: int, env: dict[str, str]
) -> float:
    """Return groups per second for `batches` [batch, group], after a warm-up."""
    counts = {"put": producers, "score": consumers, "train": 1}
    options = {"runtime_env": {"env_vars": env}}
    workers = {
        stage: [start_actor(PeerWorker, make, stage, **options) for _ in range(count)]
        for stage, count in counts.items()
    }
    try:
        run_flow(workers, batches[: 2 * max(producers, consumers)])
        return float(batches.size / run_flow(workers, batches))
    finally:
        for worker in chain(*workers.values()):
            ray.kill(worker)


def run_flow(workers: dict[str, list[Any]], batches: Array) -> float:
    """Run the flow once; return the seconds from the first put to the last removal."""
    calls = {
        stage: [worker.work.remote(batches[i :: len(same)]) for i, worker in enumerate(same)]
        for stage, same in workers.items()
    }
    description = f"a peer's flow of {batches.size} groups"
    *puts, (_, end, trained) = wait_for_all(
        [*calls["put"], *calls["train"]], description, timeout_s=FLOW_S, beside=calls["score"]
    )
    if sorted(np.ravel(trained)) != list(batches.ravel()):
        raise BenchmarkError(f"{description}: {np.size(trained)} or others arrived")
    return float(end - min(start for start, _, _ in puts))


class PeerWorker:
    """Actor of a stage: "put" sends the given groups; "score" and "train" take a batch."""

    def __init__(self, make: Callable[[], Stages], stage: str) -> None:
        self.do = make()[stage]

    def work(self, batches: Array) -> tuple[float, float, list[Any]]:
        """Do the stage's work; return start, end (on the machine's clock) and outcome."""
        start = time.monotonic()
        outcomes = [self.do(numbers.tolist()) for numbers in batches]
        return start, time.monotonic(), outcomes


def make_group(size_bytes: int) -> Group:
    """Make arrays of `size_bytes` up to one token: 13 bytes per token, 5 per rollout."""
    entries = {ColumnAxis.TOKEN: (size_bytes - 5 * ROLLOUTS) // 13, ColumnAxis.ROLLOUT: ROLLOUTS}
    specs = {name: COLUMN_SPECS[name] for name in ROLLOUT_COLUMNS}
    group = {name: np.ones(entries[spec.axis], spec.dtype) for name, spec in specs.items()}
    group["lengths"][:] = [len(part) for part in np.array_split(group["token_ids"], ROLLOUTS)]
    return group


def set_numbers(groups: list[Group], numbers: Sequence[int]) -> list[Group]:
    """Write these numbers into the groups: a group's first token is its number."""
    for group, new in zip(groups, numbers, strict=True):
        group["token_ids"][0] = new
    return groups


def compute_scores(group: Group) -> Group:
    """Read every byte as fast as possible; return scores that encode the group's number."""
    for column in group.values():
        xxhash.xxh3_64_intdigest(column.data)
    return {"scores": np.full(ROLLOUTS, group["token_ids"][0], COLUMN_SPECS["scores"].dtype)}


def check_group(group: Group) -> int:
    """Read every column and return the group's number. Raises BenchmarkError for foreign scores."""
    if (compute_scores(group)["scores"] != group["scores"]).any():
        raise BenchmarkError(f"group {group['token_ids'][0]} has the scores {group['scores']}")
    return int(group["token_ids"][0])


def make_queue_stages(
    size: int, batch: int, references: bool, generated: Queue, scored: Queue
) -> Stages:
    """Pass groups through both queues' processes, or by reference with one object per batch."""
    groups = [make_group(size) for _ in range(batch)]

    def send(queue: Queue, items: list[Group]) -> None:
        queue.put(items[0]) if batch == 1 else queue.put_nowait_batch(items)

    def take(queue: Queue) -> list[Group]:
        while True:
            try:
                return [queue.get()] if batch == 1 else queue.get_nowait_batch(batch)
            except Empty:
                time.sleep(POLL_S)

    def forward(held: list[Any]) -> None:
        scored.put((held, [compute_scores(group) for group in ray.get(held[0])]))

    def finish(held: list[Any], scores: list[Group]) -> list[int]:
        return [
            check_group(group | own) for group, own in zip(ray.get(held[0]), scores, strict=True)
        ]

    if references:
        return {
            "put": lambda numbers: generated.put([ray.put(set_numbers(groups, numbers))]),
            "score": lambda _: forward(generated.get()),
            "train": lambda _: finish(*scored.get()),
        }
    return {
        "put": lambda numbers: send(generated, set_numbers(groups, numbers)),
        "score": lambda _: send(
            scored, [group | compute_scores(group) for group in take(generated)]
        ),
        "train": lambda _: [check_group(group) for group in take(scored)],
    }


def make_row_stages(size_bytes: int, batch: int) -> Stages:
    """Pass groups through a TransferQueue partition; its controller gives each row to each task
    once."""
    import transfer_queue
    from tensordict import TensorDict

    # Without polling mode, a request for more rows than ready blocks the controller for 5 s.
    transfer_queue.init({"controller": {"polling_mode": True}})
    client = transfer_queue.get_client()
    groups = TensorDict(make_group(size_bytes)).expand(batch).clone()

    def put(numbers: Sequence[int]) -> None:
        groups["token_ids"].numpy()[:, 0] = numbers
        client.put(groups, partition_id="train")

    def take(task: str, names: Sequence[str]) -> tuple[Any, list[Group]]:
        while not (meta := client.get_meta([*names], batch, "train", task_name=task)).size:
            time.sleep(POLL_S)
        data = client.get_data(meta)
        rows = {name: data[name].unbind() for name in names}
        return meta, [{name: rows[name][i].numpy() for name in names} for i in range(batch)]

    def forward(_: Sequence[int]) -> None:
        meta, rows = take("score", ROLLOUT_COLUMNS)
        scores = np.stack([compute_scores(row)["scores"] for row in rows])
        client.put(TensorDict({"scores": scores}, batch_size=batch), metadata=meta)

    def finish(_: Sequence[int]) -> list[int]:
        meta, rows = take("train", (*ROLLOUT_COLUMNS, "scores"))
        numbers = [check_group(row) for row in rows]
        client.clear_samples(meta)
        return numbers

    return {"put": put, "score": forward, "train": finish}
