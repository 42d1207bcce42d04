"""Generator on shared devices, and evaluation on a generator that leaves."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors.generator import GeneratorActor
from streamrl.engines.generator_config import SamplingSettings
from streamrl.environments.interface import EnvironmentStep
from streamrl.errors import EpisodeError, GenerationError
from streamrl.evaluation.config import EvaluationConfig
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import ServedVersion
from tests.environments.episodes.scripted import (
    PROMPT,
    ScriptedHosts,
    ScriptedSampler,
    ScriptedSession,
    make_driver,
)
from tests.virtual_time import in_virtual_time


class Engine:
    """Engine that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self, reason: str) -> None:
        self.calls.append(f"pause for {reason}")

    async def resume(self, reason: str) -> None:
        self.calls.append(f"resume for {reason}")


async def test_suspend_pauses_the_engine_and_resume_resumes_it():
    generator, engine = GeneratorActor(), Engine()
    actor: Any = generator
    actor._generator = engine
    actor._stages = [SimpleNamespace(name="generate", spans=SpanRecorder("generator-0"))]
    await generator.suspend()
    assert engine.calls == ["pause for lease"]
    await generator.resume()
    assert engine.calls == ["pause for lease", "resume for lease"]


@in_virtual_time
async def test_an_evaluation_prompt_on_a_generator_that_left_is_not_a_failed_prompt():
    """Its environment's processes are gone: the evaluator asks another generator."""
    actor: Any = GeneratorActor()
    actor._generator, actor._served_version = Engine(), ServedVersion("generator-0")
    actor._served_version.advance_to(0)
    actor._config = SimpleNamespace(evaluation=EvaluationConfig())
    actor._stages = [SimpleNamespace(device_lease=DedicatedDeviceLease())]
    answers = iter([EnvironmentStep(done=True), EpisodeError("the processes are closed")])
    hosts = ScriptedHosts(lambda: ScriptedSession([next(answers)]))
    actor._driver = make_driver(ScriptedSampler(lambda context, seed: "a;"), hosts)
    sampled = await actor.sample(PROMPT, [1], SamplingSettings(), 0)
    assert len(sampled.columns["lengths"]) == 1 and not sampled.failure
    await actor._driver.close()
    with pytest.raises(GenerationError, match="the driver of episodes was closed"):
        await actor.sample(PROMPT, [1], SamplingSettings(), 0)
