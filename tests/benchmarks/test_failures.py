"""A benchmark ends with one line when one of its workers dies or hangs."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from benchmarks import queue, queue_peers
from benchmarks.actors import start_actor, wait_for_all
from benchmarks.command import ROOT, BenchmarkError
from streamrl.actors.launch.ray_cluster import connect_cluster, disaggregated_only
from streamrl.actors.queue_shard import RemoteShard, create_shards
from streamrl.buffer import ShardPlan
from streamrl.errors import ActorLostError
from streamrl.placement.config import PlacementConfig

LONGEST_S = 120.0
WORKERS: dict[str, Any] = {"producers": 1, "consumers": 1, "batch": 8}


@pytest.fixture(scope="module")
def ray_is_up() -> Iterator[None]:
    with connect_cluster(PlacementConfig(cpus=4, object_store_mb=500), disaggregated_only):
        yield


class Worker:
    """An actor that answers, hangs, or ends its process."""

    async def answer(self, value: int) -> int:
        return value

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        os._exit(1)


@pytest.mark.usefixtures("ray_is_up")
def test_a_wait_for_actors_ends_with_the_first_that_fails():
    healthy, dying = start_actor(Worker), start_actor(Worker)
    answers = [healthy.answer.remote(n) for n in (1, 2)]
    hanging = healthy.hang.remote()
    assert wait_for_all(answers, "answers", timeout_s=60, beside=[hanging]) == [1, 2]
    with pytest.raises(BenchmarkError, match=r"a hang: not done after 0\.1 s"):
        wait_for_all([hanging], "a hang", timeout_s=0.1)
    with pytest.raises(ActorLostError, match="the flow: the actor died"):
        wait_for_all([hanging], "the flow", timeout_s=60, beside=[dying.die.remote()])


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The actors that a flow starts, by name."""
    started: dict[str, Any] = {}

    def start_named(actor_class: type, *arguments: Any, **options: Any) -> Any:
        started[arguments[1]] = start_actor(actor_class, *arguments, **options)
        return started[arguments[1]]

    def create_named(plans: Mapping[str, ShardPlan]) -> list[RemoteShard]:
        shards = create_shards(plans)
        started.update((shard.name, shard.actor) for shard in shards)
        return shards

    monkeypatch.setattr(queue, "start_actor", start_named)
    monkeypatch.setattr(queue, "create_shards", create_named)
    monkeypatch.setattr(queue_peers, "start_actor", start_named)
    return started


def kill_during(
    flow: Callable[..., Any], actors: dict[str, Any], name: str, *, least: int
) -> Callable[..., Any]:
    """Wrap a flow: one of at least so many groups loses an actor at its start."""

    def interrupted(workers: Any, *others: Any) -> Any:
        if np.size(others[-1]) >= least:
            ray.kill(actors[name])
        return flow(workers, *others)

    return interrupted


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.usefixtures("ray_is_up")
@pytest.mark.parametrize("name", ["score-0", "shard-0", slow("put-0"), slow("train-0")])
def test_the_queue_benchmark_ends_when_an_actor_dies(
    name: str, actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue, "run_flow", kill_during(queue.run_flow, actors, name, least=1000))
    with pytest.raises(ActorLostError):
        queue.stream_queue(1024, shards=1, journal=False, num_groups=1000, **WORKERS)


@pytest.mark.usefixtures("ray_is_up")
@pytest.mark.parametrize("name", ["score", slow("put"), slow("train")])
def test_a_peers_benchmark_ends_when_a_worker_dies(
    name: str, actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        queue_peers, "run_flow", kill_during(queue_peers.run_flow, actors, name, least=1000)
    )
    with pytest.raises(ActorLostError):
        queue_peers.measure_ray_queue(1024, num_groups=1000, **WORKERS)


DYING_RANK = """
import os, time
from pathlib import Path
import torch.distributed as dist
from benchmarks.resharding import run_ranks

def work():
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(3600)

run_ranks(work, 2, Path({folder!r}))
"""


def test_the_resharding_benchmark_ends_when_a_rank_dies(tmp_path: Path):
    command = [sys.executable, "-c", DYING_RANK.format(folder=str(tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.endswith("BenchmarkError: rank 1 of 2 failed: exit code 3\n")


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_code_1_when_a_process_is_killed():
    command = [sys.executable, "-m", "benchmarks.queue", "--quick", "--share=1", "--peers"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        try:
            kill_a_member(psutil.Process(process.pid))
            out, err = process.communicate(timeout=LONGEST_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(r"queue: the flow of \d+ groups: the actor died .*\n", err)


def kill_a_member(command: psutil.Process) -> None:
    """Kill one of the processes of the flow as soon as it exists."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        for process in command.children(recursive=True):
            if "ray::FlowMember" in " ".join(process.cmdline()):
                process.kill()
                return
        time.sleep(0.05)
    raise AssertionError("no process of a member")
