"""Generator on shared devices: suspend and resume."""

from types import SimpleNamespace
from typing import Any

from streamrl.actors.generator import GeneratorActor
from streamrl.telemetry.spans import SpanRecorder


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
