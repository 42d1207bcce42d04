"""Liveness: unresponsive processes are found, named and restarted."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from streamrl.actors.coordination.coordinator import CoordinatorActor
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.generator import HybridActor, HybridActorHandle
from streamrl.actors.launch.actor_registry import ActorRegistry, ActorRestarts, get_actor_class
from streamrl.actors.launch.driver import RunSession
from streamrl.actors.liveness import (
    LivenessMonitor,
    PingableActor,
    ProcessLocation,
    find_unresponsive,
    name_unresponsive,
)
from streamrl.actors.queue_shard import ShardActor
from streamrl.actors.scoring_ranks import ScoringRankActor
from streamrl.actors.trainer import TrainerActor
from streamrl.config.run_config import load_config
from streamrl.dataflow import GENERATE_CALL, POLICY, REWARD_CALL, SOURCE_CALLS
from streamrl.errors import DeadlineError, FilterLimitError
from tests.actors.fakes import RECIPE, make_prepared
from tests.virtual_time import ManualClock

pytestmark = pytest.mark.xdist_group("ray")


class Waiter:
    """Actor that waits, like a leading rank for its followers."""

    async def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> None:
        await asyncio.sleep(600.0)

    async def ping(self) -> ProcessLocation:
        return ProcessLocation.from_this_process()


@pytest.fixture(scope="module")
def processes(local_ray: None) -> Iterator[dict[str, ray.actor.ActorHandle]]:
    """Start processes in three states: waiting, stopped (SIGSTOP) and dead (SIGKILL)."""
    waiter: Any = ray.remote(num_cpus=0)(Waiter)
    actors = {
        name: waiter.remote() for name in ("coordinator", "generator-0", "generator-1", "reward-0")
    }
    pids = {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}
    actors["generator-0"].wait.remote()
    os.kill(pids["reward-0"], signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(actors["reward-0"].wait.remote(), timeout=60.0)
    os.kill(pids["generator-1"], signal.SIGSTOP)
    yield actors
    os.kill(pids["generator-1"], signal.SIGKILL)


def test_a_timeout_error_names_unresponsive_processes_and_other_errors_stay_unchanged(
    processes: dict[str, ray.actor.ActorHandle],
):
    message = "stage train got no group for 30 s (held by generator-0 for 31.5 s)"
    named = rf"^the process of generator-1 does not answer; {re.escape(message)}$"
    with pytest.raises(DeadlineError, match=named), name_unresponsive(lambda: processes):
        raise DeadlineError(message)
    other_error = FilterLimitError("no group passes")
    with pytest.raises(FilterLimitError) as caught, name_unresponsive(lambda: processes):
        raise other_error
    assert caught.value is other_error
    with pytest.raises(DeadlineError, match=rf"^{re.escape(message)}$"), name_unresponsive(dict):
        raise DeadlineError(message)


def test_processes_lists_each_process_once_without_unplaced_replicas():
    config = load_config(RECIPE, ["placement.mode=colocated", "trainer.world_size=2"])
    registry = ActorRegistry(config, make_prepared(config), on_gpu=False)
    calls = {call.role: call for call in config.dataflow.calls}
    hosts: list[Any] = ["first", "second"]
    for role, name in ((GENERATE_CALL.role, "generator"), (POLICY, "trainer")):
        handles = {f"{name}-{i}": HybridActorHandle(host, name) for i, host in enumerate(hosts)}
        registry.actors |= handles
        registry.roles[role] = RoleActors([calls[role]], list(handles), list(handles.values()))
    registry.roles[REWARD_CALL.role] = RoleActors(
        [calls[REWARD_CALL.role]], ["reward-0"], ["scorer"]
    )
    # reward-1 is spawned and waits for placement.
    registry.actors |= {
        "coordinator": "c",
        "shard-0": "s",
        "reward-0": "scorer",
        "reward-1": "none",
    }
    assert registry.processes == {
        "generator-0 and trainer-0": "first",
        "generator-1 and trainer-1": "second",
        "reward-0": "scorer",
        "coordinator": "c",
        "shard-0": "s",
    }


def watch_actors(
    monitor: LivenessMonitor,
    clock: ManualClock,
    actors: dict[str, Any],
    seconds: int,
    *,
    stopped: str = "",
) -> list[str]:
    """Return the actors reported silent within `seconds`; every actor except `stopped` answers."""
    silent = []
    for _ in range(seconds):
        clock.now += 1.0
        silent += monitor.ping_actors(actors)
        for name, ping in monitor._pending_pings.items():
            if name != stopped:
                ray.wait([ping.reply], timeout=30.0)
    return silent


def test_an_irreplaceable_silent_process_is_reported_once_and_not_killed(
    processes: dict[str, ray.actor.ActorHandle], tmp_path: Path
):
    config = load_config(RECIPE, [f"run.dir={tmp_path}", "run.silent_s=12"])
    nothing: Any = None
    session = RunSession(
        config, make_prepared(config), on_gpu=False, shard_bytes=0, engines=nothing
    )
    calls = {call.role: call for call in config.dataflow.calls}
    registry = session._registry
    stopped = processes["generator-1"]
    waiting = processes["generator-0"]
    # The trainer rank is stopped; the generator and the coordinator answer.
    registry.actors = {"trainer-0": stopped, "generator-0": waiting}
    registry.actors["coordinator"] = processes["coordinator"]
    for role, name in ((POLICY, "trainer-0"), (GENERATE_CALL.role, "generator-0")):
        registry.roles[role] = RoleActors([calls[role]], [name], [registry.actors[name]])
    registry.restarts["generator-0"] = ActorRestarts(nothing, 3)
    session._irreplaceable = registry.irreplaceable
    assert list(session._irreplaceable) == ["coordinator", "trainer-0"]
    events: list[Any] = []
    clock = ManualClock()
    session._liveness = LivenessMonitor(config.run.silent_s, clock=clock)
    for _ in range(40):
        clock.now += 1.0
        session._replace_unresponsive(events.append, restart=True)
        replies = [
            ping.reply
            for name, ping in session._liveness._pending_pings.items()
            if name != "trainer-0"
        ]
        ray.wait(replies or [ray.put(0)], num_returns=len(replies) or 1, timeout=30.0)
    (event,) = events
    assert event.name == "silent" and event.fields["actor"] == "trainer-0"
    reason = "trainer-0 has not answered for 12 s (run.silent_s): its process cannot be restarted"
    assert event.fields["reason"].startswith(reason)
    assert find_unresponsive(processes, timeout_s=1.0) == ["generator-1"], "stopped, not killed"


def test_every_actor_of_a_run_is_pingable():
    classes = {get_actor_class(call) for call in SOURCE_CALLS} | {TrainerActor, ScoringRankActor}
    for actor_class in (*classes, CoordinatorActor, HybridActor, ShardActor):
        assert issubclass(actor_class, PingableActor), actor_class


def test_a_silent_actor_is_reported_once_until_it_answers_and_is_restarted_once_killed(
    local_ray: None,
):
    waiter: Any = ray.remote(num_cpus=0, max_restarts=1)(Waiter)
    actors = {name: waiter.remote() for name in ("generator-0", "generator-1")}
    pids = {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}
    pid, clock = pids["generator-1"], ManualClock()
    monitor = LivenessMonitor(12.0, clock=clock)
    assert watch_actors(monitor, clock, actors, 10) == []
    assert monitor.find_pid("generator-1") == str(pid)
    os.kill(pid, signal.SIGSTOP)
    silent = watch_actors(monitor, clock, actors, 60, stopped="generator-1")
    assert silent == ["generator-1"], "reported once"
    pending = monitor._pending_pings["generator-1"]
    assert watch_actors(monitor, clock, actors, 10, stopped="generator-1") == []
    assert monitor._pending_pings["generator-1"] is pending, "at most one pending ping per actor"
    os.kill(pid, signal.SIGCONT)
    assert watch_actors(monitor, clock, actors, 30) == []
    os.kill(pid, signal.SIGSTOP)
    assert watch_actors(monitor, clock, actors, 30, stopped="generator-1") == ["generator-1"]
    monitor.kill_actor("generator-1", actors["generator-1"])
    restarted_pid = actors["generator-1"].pid.options(max_task_retries=-1).remote()
    assert ray.get(restarted_pid, timeout=60.0) not in pids.values()
    assert watch_actors(monitor, clock, actors, 30) == []


def test_a_pause_of_the_monitor_and_a_death_do_not_count_as_silence(
    processes: dict[str, ray.actor.ActorHandle],
):
    clock = ManualClock()
    monitor = LivenessMonitor(30.0, clock=clock)
    actors = {"generator-1": processes["generator-1"]}
    assert monitor.ping_actors(actors) == []
    clock.now += 3600.0
    assert monitor.ping_actors(actors) == [], "the actor gets time to answer after the pause"
    monitor = LivenessMonitor(6.0, clock=clock)
    assert watch_actors(monitor, clock, {"reward-0": processes["reward-0"]}, 15) == []
