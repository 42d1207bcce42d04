"""Which process of a run does nothing any more, when somebody has waited in vain."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from streamrl.actors.colocated import HybridActor, HybridActorHandle
from streamrl.actors.coordination.step_reporter import RoleActors
from streamrl.actors.coordinator import CoordinatorActor
from streamrl.actors.launch.actor_registry import ACTOR_CLASSES, ActorRegistry
from streamrl.actors.launch.driver import RunSession
from streamrl.actors.liveness import (
    LivenessMonitor,
    PingableActor,
    ProcessLocation,
    find_unresponsive,
    name_unresponsive,
)
from streamrl.actors.queue_shard import ShardActor
from streamrl.config import load_config
from streamrl.config.preflight import PreparedRun
from streamrl.dataflow import GENERATE_CALL, POLICY, REWARD_CALL
from streamrl.errors import DeadlineError, FilterLimitError

pytestmark = pytest.mark.xdist_group("ray")

RECIPE = Path(__file__).parents[2] / "configs" / "grpo_arithmetic.yaml"


class Waiter:
    """Waits, as a leader does for those who compute along."""

    async def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> None:
        await asyncio.sleep(600.0)

    async def life(self) -> ProcessLocation:
        return ProcessLocation.from_this_process()


@pytest.fixture(scope="module")
def processes(local_ray: None) -> Iterator[dict[str, ray.actor.ActorHandle]]:
    """One that waits, one that is stopped, and one that is dead."""
    waiter: Any = ray.remote(num_cpus=0)(Waiter)
    found = {name: waiter.remote() for name in ("generator-0", "generator-1", "reward-0")}
    pids = {name: ray.get(one.pid.remote()) for name, one in found.items()}
    found["generator-0"].wait.remote()
    os.kill(pids["reward-0"], signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(found["reward-0"].wait.remote(), timeout=60.0)
    os.kill(pids["generator-1"], signal.SIGSTOP)
    yield found
    os.kill(pids["generator-1"], signal.SIGKILL)


@pytest.mark.slow
def test_of_those_that_wait_are_stopped_and_are_dead_only_the_stopped_one_is_silent(
    processes: dict[str, ray.actor.ActorHandle],
) -> None:
    assert find_unresponsive(processes, timeout_s=2.0) == ["generator-1"]
    others = {name: one for name, one in processes.items() if name != "generator-1"}
    began = time.monotonic()
    assert find_unresponsive(others) == []
    assert time.monotonic() - began < 2.0, "nobody is waited for who answers"


def test_an_error_of_waiting_names_who_is_silent_and_others_stay_as_they_are(
    processes: dict[str, ray.actor.ActorHandle],
) -> None:
    said = "stage train got no group for 30 s (held by generator-0 for 31.5 s)"
    named = rf"^the process of generator-1 does not answer; {re.escape(said)}$"
    with pytest.raises(DeadlineError, match=named), name_unresponsive(lambda: processes):
        raise DeadlineError(said)
    other = FilterLimitError("no group passes")
    with pytest.raises(FilterLimitError) as found, name_unresponsive(lambda: processes):
        raise other
    assert found.value is other
    with pytest.raises(DeadlineError, match=rf"^{re.escape(said)}$"), name_unresponsive(dict):
        raise DeadlineError(said)


def test_each_process_is_asked_once_and_not_those_that_have_none_yet() -> None:
    config = load_config(RECIPE, ["placement.mode=colocated", "trainer.world_size=2"])
    nothing: Any = None
    crew = ActorRegistry(
        config, PreparedRun(config.dataflow, nothing, {}, (), 8, 0, ()), on_gpu=False
    )
    calls = {call.role: call for call in config.dataflow.calls}
    hosts: list[Any] = ["first", "second"]
    for role, name in ((GENERATE_CALL.role, "generator"), (POLICY, "trainer")):
        parts = {f"{name}-{i}": HybridActorHandle(host, name) for i, host in enumerate(hosts)}
        crew.actors |= parts
        crew.roles[role] = RoleActors([calls[role]], list(parts), list(parts.values()))
    crew.roles[REWARD_CALL.role] = RoleActors([calls[REWARD_CALL.role]], ["reward-0"], ["scorer"])
    # One more was hired and waits for a place.
    crew.actors |= {"coordinator": "c", "shard-0": "s", "reward-0": "scorer", "reward-1": "none"}
    assert crew.processes == {
        "generator-0 and trainer-0": "first",
        "generator-1 and trainer-1": "second",
        "reward-0": "scorer",
        "coordinator": "c",
        "shard-0": "s",
    }


class Clock:
    """Seconds that pass by assignment."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(
    vigil: LivenessMonitor, clock: Clock, actors: dict[str, Any], seconds: int, *, stopped: str = ""
) -> list[str]:
    """Who is found silent within so many seconds; who is not stopped has answered in each."""
    found = []
    for _ in range(seconds):
        clock.now += 1.0
        found += vigil.ping_actors(actors)
        for name, asked in vigil._pending_pings.items():
            if name != stopped:
                ray.wait([asked.reply], timeout=30.0)
    return found


def test_whoever_is_not_ended_is_found_again_only_after_an_answer(local_ray: None) -> None:
    waiter: Any = ray.remote(num_cpus=0)(Waiter)
    actors = {"trainer-0": waiter.remote()}
    pid = ray.get(actors["trainer-0"].pid.remote())
    clock = Clock()
    vigil = LivenessMonitor(12.0, clock=clock)
    assert watched(vigil, clock, actors, 10) == [] and vigil.find_pid("trainer-0") == str(pid)
    try:
        os.kill(pid, signal.SIGSTOP)
        found = watched(vigil, clock, actors, 60, stopped="trainer-0")
        assert found == ["trainer-0"], "once"
        assert len(vigil._pending_pings) == 1, "nothing piles up"
        os.kill(pid, signal.SIGCONT)
        assert watched(vigil, clock, actors, 30) == []
        os.kill(pid, signal.SIGSTOP)
        assert watched(vigil, clock, actors, 30, stopped="trainer-0") == ["trainer-0"]
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_silent_process_that_has_no_other_is_named_once_and_left_alone(
    processes: dict[str, ray.actor.ActorHandle], tmp_path: Path
) -> None:
    config = load_config(RECIPE, [f"run.dir={tmp_path}", "run.silent_s=12"])
    nothing: Any = None
    prepared = PreparedRun(config.dataflow, nothing, {}, (), 8, 0, ())
    session = RunSession(config, prepared, on_gpu=False, shard_bytes=0, engines=nothing)
    calls = {call.role: call for call in config.dataflow.calls}
    crew, stopped, waiting = session._registry, processes["generator-1"], processes["generator-0"]
    # A rank that is stopped, a generator and the coordinator that are not.
    crew.actors = {"coordinator": waiting, "trainer-0": stopped, "generator-0": waiting}
    for role, name in ((POLICY, "trainer-0"), (GENERATE_CALL.role, "generator-0")):
        crew.roles[role] = RoleActors([calls[role]], [name], [crew.actors[name]])
    crew.restarts.register_actor("generator-0", nothing)
    session._irreplaceable = crew.restarts.select_irreplaceable(crew.processes)
    assert sorted(session._irreplaceable) == ["coordinator", "trainer-0"]
    told: list[Any] = []
    clock = Clock()
    session._liveness = LivenessMonitor(config.run.silent_s, clock=clock)
    for _ in range(40):
        clock.now += 1.0
        session._replace_unresponsive(told.append)
        others = [
            one.reply
            for name, one in session._liveness._pending_pings.items()
            if name != "trainer-0"
        ]
        ray.wait(others or [ray.put(0)], num_returns=len(others) or 1, timeout=30.0)
    (event,) = told
    assert event.name == "silent" and event.fields["actor"] == "trainer-0"
    assert event.fields["reason"] == (
        "trainer-0 has not answered for 12 s (run.silent_s): its process cannot be restarted, so"
        " the run waits for it. If it was stopped, kill -CONT continues it; otherwise stop the run"
        " and use streamrl train --resume"
    )
    assert find_unresponsive(processes, timeout_s=1.0) == ["generator-1"], (
        "it is stopped, not ended"
    )


def test_every_actor_of_a_run_gives_signs_of_life() -> None:
    for kind in (*ACTOR_CLASSES.values(), CoordinatorActor, HybridActor, ShardActor):
        assert issubclass(kind, PingableActor), kind


def test_whoever_answers_nothing_is_found_once_and_ended_and_answers_again(local_ray: None) -> None:
    waiter: Any = ray.remote(num_cpus=0, max_restarts=1)(Waiter)
    actors = {name: waiter.remote() for name in ("generator-0", "generator-1")}
    pids = {name: ray.get(one.pid.remote()) for name, one in actors.items()}
    clock = Clock()
    vigil = LivenessMonitor(12.0, clock=clock)
    assert watched(vigil, clock, actors, 30) == []
    os.kill(pids["generator-1"], signal.SIGSTOP)
    assert watched(vigil, clock, actors, 15, stopped="generator-1") == ["generator-1"]
    vigil.kill_actor("generator-1", actors["generator-1"])
    again = actors["generator-1"].pid.options(max_task_retries=-1).remote()
    assert ray.get(again, timeout=60.0) not in pids.values()
    assert watched(vigil, clock, actors, 30) == []


def test_a_pause_of_whoever_looks_is_not_taken_for_silence_of_others(
    processes: dict[str, ray.actor.ActorHandle],
) -> None:
    clock = Clock()
    vigil = LivenessMonitor(30.0, clock=clock)
    actors = {"generator-1": processes["generator-1"]}
    assert vigil.ping_actors(actors) == []
    clock.now += 3600.0
    assert vigil.ping_actors(actors) == [], "it may answer now that the other goes on"


def test_the_dead_are_not_silent(processes: dict[str, ray.actor.ActorHandle]) -> None:
    clock = Clock()
    vigil = LivenessMonitor(6.0, clock=clock)
    assert watched(vigil, clock, {"reward-0": processes["reward-0"]}, 15) == []
