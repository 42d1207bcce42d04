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

from streamrl.actors.crew import Crew
from streamrl.actors.hybrid import Part
from streamrl.actors.reporting import RoleActors
from streamrl.actors.silence import LifeSign, Vigil, naming_silent, silent
from streamrl.config import load_config
from streamrl.dataflow import GENERATE, POLICY, REWARD
from streamrl.errors import DeadlineError, FilterError
from streamrl.preflight import Prepared

pytestmark = pytest.mark.xdist_group("ray")

RECIPE = Path(__file__).parents[2] / "configs" / "grpo_arithmetic.yaml"


class Waiter:
    """Waits, as a leader does for those who compute along."""

    async def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> None:
        await asyncio.sleep(600.0)

    async def life(self) -> LifeSign:
        return LifeSign.here()


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
    assert silent(processes, within_s=2.0) == ["generator-1"]
    others = {name: one for name, one in processes.items() if name != "generator-1"}
    began = time.monotonic()
    assert silent(others) == []
    assert time.monotonic() - began < 2.0, "nobody is waited for who answers"


def test_an_error_of_waiting_names_who_is_silent_and_others_stay_as_they_are(
    processes: dict[str, ray.actor.ActorHandle],
) -> None:
    said = "stage train got no group for 30 s (held by generator-0 for 31.5 s)"
    named = rf"^the process of generator-1 does not answer; {re.escape(said)}$"
    with pytest.raises(DeadlineError, match=named), naming_silent(lambda: processes):
        raise DeadlineError(said)
    other = FilterError("no group passes")
    with pytest.raises(FilterError) as found, naming_silent(lambda: processes):
        raise other
    assert found.value is other
    with pytest.raises(DeadlineError, match=rf"^{re.escape(said)}$"), naming_silent(dict):
        raise DeadlineError(said)


def test_each_process_is_asked_once_and_not_those_that_have_none_yet() -> None:
    config = load_config(RECIPE, ["placement.mode=colocated", "trainer.world_size=2"])
    nothing: Any = None
    crew = Crew(config, Prepared(config.dataflow, nothing, {}, (), 8, 0, ()), on_gpu=False)
    calls = {call.role: call for call in config.dataflow.calls}
    hosts: list[Any] = ["first", "second"]
    for role, name in ((GENERATE.role, "generator"), (POLICY, "trainer")):
        parts = {f"{name}-{i}": Part(host, name) for i, host in enumerate(hosts)}
        crew.actors |= parts
        crew.roles[role] = RoleActors([calls[role]], list(parts), list(parts.values()))
    crew.roles[REWARD.role] = RoleActors([calls[REWARD.role]], ["reward-0"], ["scorer"])
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
    vigil: Vigil, clock: Clock, actors: dict[str, Any], seconds: int, *, stopped: str = ""
) -> list[str]:
    """Who is found silent within so many seconds; who is not stopped has answered in each."""
    found = []
    for _ in range(seconds):
        clock.now += 1.0
        found += vigil.look(actors)
        for name, asked in vigil._asked.items():
            if name != stopped:
                ray.wait([asked.reply], timeout=30.0)
    return found


def test_whoever_answers_nothing_is_found_once_and_ended_and_answers_again(local_ray: None) -> None:
    waiter: Any = ray.remote(num_cpus=0, max_restarts=1)(Waiter)
    actors = {name: waiter.remote() for name in ("generator-0", "generator-1")}
    pids = {name: ray.get(one.pid.remote()) for name, one in actors.items()}
    clock = Clock()
    vigil = Vigil(12.0, clock=clock)
    assert watched(vigil, clock, actors, 30) == []
    os.kill(pids["generator-1"], signal.SIGSTOP)
    assert watched(vigil, clock, actors, 15, stopped="generator-1") == ["generator-1"]
    vigil.end("generator-1", actors["generator-1"])
    again = actors["generator-1"].pid.options(max_task_retries=-1).remote()
    assert ray.get(again, timeout=60.0) not in pids.values()
    assert watched(vigil, clock, actors, 30) == []


def test_a_pause_of_whoever_looks_is_not_taken_for_silence_of_others(
    processes: dict[str, ray.actor.ActorHandle],
) -> None:
    clock = Clock()
    vigil = Vigil(30.0, clock=clock)
    actors = {"generator-1": processes["generator-1"]}
    assert vigil.look(actors) == []
    clock.now += 3600.0
    assert vigil.look(actors) == [], "it may answer now that the other goes on"


def test_the_dead_are_not_silent(processes: dict[str, ray.actor.ActorHandle]) -> None:
    clock = Clock()
    vigil = Vigil(6.0, clock=clock)
    assert watched(vigil, clock, {"reward-0": processes["reward-0"]}, 15) == []
