"""Generator on shared devices, the device lease of episodes, and a generator that leaves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamrl.actors.generator import GeneratorActor
from streamrl.engines.generator_config import SamplingSettings
from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.interface import EnvironmentStep, Reply
from streamrl.errors import EpisodeError, GenerationError
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.evaluation.config import EvaluationConfig
from streamrl.stream.protocols import StageContext
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import ServedVersion
from tests.actors.fakes import FakeGenerator
from tests.environments.episodes.scripted import (
    PROMPT,
    ScriptedHosts,
    ScriptedSampler,
    ScriptedSession,
    make_driver,
    say,
)
from tests.virtual_time import in_virtual_time


class CountingLease:
    """Device lease that counts its users."""

    def __init__(self) -> None:
        self.num_users = 0

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1

    def report_progress(self) -> None:
        pass


async def test_suspend_pauses_the_engine_and_resume_resumes_it():
    actor: Any = GeneratorActor()
    actor._generator = engine = FakeGenerator()
    actor._stages = [SimpleNamespace(name="generate", spans=SpanRecorder("generator-0"))]
    await actor.suspend()
    assert engine.calls == ["pause for lease"]
    await actor.resume()
    assert engine.calls == ["pause for lease", "resume from lease"]


async def test_an_episode_holds_the_device_lease_for_its_turns_and_not_for_its_group():
    lease, while_sampling, while_waiting = CountingLease(), list[int](), list[int]()

    class Session(ScriptedSession):
        async def step(self, reply: Reply) -> EnvironmentStep:
            while_waiting.append(lease.num_users)
            return cast(EnvironmentStep, await super().step(reply))

    def write(context: str, seed: int) -> str:
        while_sampling.append(lease.num_users)
        return "a;"

    actor: Any = GeneratorActor()
    actor._config = SimpleNamespace(
        run=SimpleNamespace(seed=0),
        algorithm=SimpleNamespace(group_size=1),
        environment=EnvironmentConfig("guess.py"),
    )
    steps = [say("x"), EnvironmentStep(done=True)]
    actor._driver = make_driver(ScriptedSampler(write), ScriptedHosts(lambda: Session(steps)))
    stage = StageContext("generate", cast(Any, None), lease, SpanRecorder("generator-0"))
    sample, read_partials = actor._make_sample_function(None, stage)
    columns = await sample(PROMPT, None, lambda: None)
    assert (while_sampling, while_waiting) == ([1, 1], [0, 0])
    assert columns["num_turns"].tolist() == [2]
    assert await read_partials() == {}, "an interrupted episode begins anew"


@in_virtual_time
async def test_an_evaluation_prompt_on_a_generator_that_left_is_not_a_failed_prompt():
    """Its environment's processes are gone: the evaluator asks another generator."""
    actor: Any = GeneratorActor()
    actor._generator, actor._served_version = object(), ServedVersion("generator-0")
    actor._served_version.advance_to(0)
    actor._config = SimpleNamespace(evaluation=EvaluationConfig())
    actor._stages = [SimpleNamespace(device_lease=DedicatedDeviceLease())]
    answers = iter([EnvironmentStep(done=True), EpisodeError("the processes are closed")])
    hosts = ScriptedHosts(lambda: ScriptedSession([next(answers)]))
    actor._driver = make_driver(ScriptedSampler(), hosts)
    sampled = await actor.sample(PROMPT, [1], SamplingSettings(), 0)
    assert len(sampled.columns["lengths"]) == 1 and not sampled.failure
    await actor._driver.close()
    with pytest.raises(GenerationError, match="the driver of episodes was closed"):
        await actor.sample(PROMPT, [1], SamplingSettings(), 0)
