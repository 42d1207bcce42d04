"""A generator gives way: what computes stands still, and goes on."""

import asyncio
from types import SimpleNamespace
from typing import Any

from streamrl.actors.generator import GeneratorActor
from streamrl.telemetry.spans import SpanRecorder


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def pause(self, reason: str) -> None:
        self.told.append(f"suspend for {reason}")

    async def resume(self, reason: str) -> None:
        self.told.append(f"resume for {reason}")


def test_its_engine_samples_nothing_while_others_have_the_pool() -> None:
    async def main() -> list[str]:
        generator, engine = GeneratorActor(), Engine()
        there: Any = generator
        there._generator = engine
        there._stages = [SimpleNamespace(name="generate", spans=SpanRecorder("generator-0"))]
        await generator.suspend()
        assert engine.told == ["suspend for lease"]
        await generator.resume()
        return engine.told

    assert asyncio.run(main()) == ["suspend for lease", "resume for lease"]
