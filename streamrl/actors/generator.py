"""A generator replica: hosts the loops of the generating stages and follows the weights."""

import asyncio
from collections.abc import Sequence

import ray

from streamrl.actors.engine_factory import HostedGenerator
from streamrl.actors.wiring import ActorReport, RemoteChannel, Wiring
from streamrl.dataflow import POLICY, Call
from streamrl.errors import ActorLostError
from streamrl.messages import Prompt, Rollout
from streamrl.pipeline import follow_weights, generate
from streamrl.weights import HeldVersion


@ray.remote
class GeneratorActor:
    """Long-lived: engine and loops live as long as the run, or as the process does."""

    def __init__(self) -> None:
        self._generator: HostedGenerator | None = None

    async def start(self, wiring: Wiring, replica: int, calls: Sequence[Call]) -> None:
        """Load the engine. It serves nothing until `run` has pulled the current version."""
        name = f"generator-{replica}"
        self._wiring = wiring
        self._stages = wiring.stages(calls, name)
        self._held = HeldVersion(name)
        self._channel = RemoteChannel(wiring.coordinator, name, POLICY)
        self._generator = await wiring.engines.generator(wiring.config, wiring.max_length, replica)

    async def run(self) -> None:
        """The loops of the stages, until the actor is killed."""
        config, generator, held = self._wiring.config, self._generator, self._held
        assert generator is not None
        # What runs at once for a prompt: its group, and a greedy completion if that is asked for.
        rollouts = config.algorithm.group_size + len(self._stages) - 1
        slots = max(1, config.generator.max_concurrent_rollouts // rollouts)
        stall_s = config.pipeline.stall_s
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow_weights(self._stages[0], generator, self._channel, held))
            for stage in self._stages:
                sample = generator.stages[stage.name]
                tasks.create_task(generate(stage, sample, held, slots=slots, stall_s=stall_s))

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], temperature: float, version: int
    ) -> list[Rollout]:
        """Rollouts for an evaluation of `version` (or a newer one)."""
        if self._generator is None:
            raise ActorLostError("this generator has died and is not yet back")
        stall_s = self._wiring.config.pipeline.stall_s
        await self._held.at_least(version, timeout_s=stall_s)
        async with self._stages[0].lease.hold("evaluate"):
            return await self._generator.sample(prompt, seeds, temperature=temperature)

    async def drain(self) -> ActorReport:
        """What this replica did since the last call."""
        if self._generator is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        return ActorReport(spans.process, spans.drain())
