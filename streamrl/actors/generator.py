"""A generator replica: hosts the loops of the generating stages and follows the weights."""

import asyncio
import os
from collections.abc import Sequence

import ray

from streamrl.actors.engine_factory import HostedGenerator
from streamrl.actors.wiring import ActorReport, Wiring
from streamrl.dataflow import GENERATE, POLICY, Call
from streamrl.errors import ActorLostError
from streamrl.messages import Prompt, Rollout
from streamrl.pipeline import follow_weights, generate
from streamrl.serving import nothing_begun
from streamrl.weights import HeldVersion


@ray.remote
class GeneratorActor:
    """Long-lived: engine and loops live as long as the run, or as the process does."""

    def __init__(self) -> None:
        self._generator: HostedGenerator | None = None

    async def start(self, wiring: Wiring, replica: int, calls: Sequence[Call]) -> None:
        """Load the engine. It serves nothing until `run` has pulled the current version."""
        name = self._name = f"generator-{replica}"
        self._wiring = wiring
        self._stages = wiring.stages(calls, name)
        self._held = HeldVersion(name)
        self._channel = wiring.channel(name, POLICY)
        self._generator = await wiring.engines.generator(wiring.config, wiring.max_length, replica)

    async def run(self) -> None:
        """The loops of the stages, until the actor is killed or has left."""
        config, generator, held = self._wiring.config, self._generator, self._held
        assert generator is not None
        # What runs at once for a prompt: its group, and a greedy completion if that is asked for.
        rollouts = config.algorithm.group_size + len(self._stages) - 1
        slots = max(1, config.generator.max_concurrent_rollouts // rollouts)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(
                follow_weights(self._stages[0], generator, self._channel, held)
            )
            loops = []
            for stage in self._stages:
                sample = generator.stages[stage.name]
                begun = generator.begun if stage.name == GENERATE.stage else nothing_begun
                loop = generate(stage, sample, held, slots=slots, begun=begun)
                loops.append(tasks.create_task(loop))
            await asyncio.wait(loops)
            following.cancel()
        # Not before all stages have left their notes: they are of the leases that end here.
        await self._stages[0].queue.release(self._name, died=False)

    async def leave(self) -> None:
        """Take nothing more; `run` ends once what is held lies with the queue."""
        self._stages[0].leaving.set()

    async def fail(self) -> None:
        """End this process as a death would: what it serves is not to be trusted any more."""
        os._exit(1)

    async def serving(self) -> int:
        """Wait for the first version to be held, and say which one is."""
        return await self._held.at_least(0)

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], temperature: float, version: int
    ) -> list[Rollout]:
        """Rollouts for an evaluation of `version` (or a newer one)."""
        if self._generator is None:
            raise ActorLostError("this generator has died and is not yet back")
        await self._held.at_least(version)
        async with self._stages[0].lease.hold("evaluate"):
            return await self._generator.sample(prompt, seeds, temperature=temperature)

    async def drain(self) -> ActorReport:
        """What this replica did since the last call."""
        if self._generator is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        return ActorReport(spans.process, spans.drain())
