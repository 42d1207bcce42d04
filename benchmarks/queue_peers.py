"""What others offer for the flow of `benchmarks.queue`: `python -m benchmarks.queue_peers`.

Producers put groups; scorers take them, read every column and add one, `scores`; a trainer takes
what is complete, reads every column and removes it. Each is a Ray actor, and the clock runs from
the first put to the last removal. MB are 10^6 bytes of the groups' arrays, `scores` left out.
ray_queue: two unbounded `ray.util.queue.Queue`s in a row: a group per call, its batch calls, or
with `references` a `ray.put` per batch, whose reference alone goes through the queues.
transfer_queue: verl's TransferQueue as its streaming tutorial calls it, default storage, a row per
group. memcpy: the limit. A peer is given what helps it: a batch is laid out before the clock
starts and used again with other numbers, and only numbers and scores are checked.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.queue import Empty, Queue

from streamrl.messages import ROLLOUT_COLUMNS, SCHEMA, Array, Per

TRANSFER_QUEUE = "TransferQueue==0.1.11"
BUILD = Path(__file__).resolve().parent.parent / "build"
GROUPS = {1 << 10: 8192, 1 << 16: 2048, 1 << 20: 512}  # how many of each size in bytes
ROLLOUTS = 8
POLL_S = 0.02  # pause of a consumer that found less than a batch: no batch call waits
DEADLINE_S = 300.0
MEMCPY_BYTES = 256 << 20  # more than a cache holds

Group = dict[str, Array]
Figures = dict[str, float]


class PeerError(RuntimeError):
    """A peer could not be installed, or did not hand on every group once."""


def measure_all(size_bytes: int, num_groups: int, batch: int = 32) -> dict[str, dict[str, Any]]:
    """Every peer at one size: its figures, or {"error": why there are none}."""
    many = {"num_groups": num_groups, "producers": 2, "consumers": 2, "batch": batch}
    few = {**many, "num_groups": num_groups // 8, "batch": 1}
    peers: dict[str, Callable[[], Figures]] = {
        "ray_queue": lambda: ray_queue(size_bytes, **few),
        "ray_queue_batch": lambda: ray_queue(size_bytes, **many),
        "ray_queue_references": lambda: ray_queue(size_bytes, **many, references=True),
        "transfer_queue": lambda: transfer_queue(size_bytes, **many),
        "memcpy": lambda: memcpy(size_bytes),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, peer in peers.items():
        try:
            found[name] = {**peer()}
        except (PeerError, RayError) as error:
            found[name] = {"error": str(error).strip().splitlines()[-1]}
    return found


def ray_queue(
    size_bytes: int,
    *,
    num_groups: int,
    producers: int,
    consumers: int,
    batch: int,
    references: bool = False,
) -> Figures:
    """Two Ray queues, one behind the other, `consumers` scorers between them."""
    queues = [Queue(actor_options={"num_cpus": 0}) for _ in range(2)]
    kind = RayReferences if references else RayQueues
    workers = start(lambda: kind([make_group(size_bytes)] * batch, *queues), producers, consumers)
    try:
        return measure(workers, size_bytes, num_groups, batch)
    finally:
        for queue in queues:
            queue.shutdown(force=True)


def transfer_queue(
    size_bytes: int, *, num_groups: int, producers: int, consumers: int, batch: int
) -> Figures:
    """TransferQueue, which takes three of the cluster's CPUs. Raises PeerError."""
    path = os.pathsep.join(filter(None, [str(install()), os.environ.get("PYTHONPATH")]))
    # Its default, 8 threads for every copy in every process, halves it where cores are few.
    threads = str(max(1, (os.cpu_count() or 1) // 8))
    environment = {"PYTHONPATH": path, "TQ_NUM_THREADS": threads}
    workers = start(lambda: TransferQueueRows(make_group(size_bytes), batch), producers, consumers, environment)
    return measure(workers, size_bytes, num_groups, batch)
