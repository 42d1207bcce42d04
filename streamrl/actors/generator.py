"""A generator replica: hosts the loops of the generating stages and follows the weights."""

from collections.abc import Sequence

from streamrl.actors.actor_context import ActorReport, Wiring
from streamrl.actors.liveness import LifeSign
from streamrl.actors.protocols import HostedGenerator, HostedPart
from streamrl.actors.replica import Replica
from streamrl.actors.shared_weights import (
    PartFollower,
    Residence,
    ResidentChannel,
    ResidentFollower,
)
from streamrl.dataflow import GENERATE, POLICY, Call
from streamrl.engines.generator_config import Sampling
from streamrl.errors import ActorLostError
from streamrl.messages import Prompt, Rollout
from streamrl.pipeline import generate
from streamrl.stream.stage_worker import nothing_begun, shared_places


class GeneratorActor(Replica):
    """Long-lived: engine and loops live as long as the run, or as the process does."""

    def __init__(self, residence: Residence | None = None) -> None:
        """`residence` is there if a trainer shares this process, and the weights."""
        self._generator: HostedGenerator | None = None
        self._residence = residence

    async def start(self, wiring: Wiring, replica: int, calls: Sequence[Call]) -> None:
        """Load the engine. It serves nothing until `run` has pulled the current version."""
        self._config = wiring.config
        self._take_place(wiring, calls, f"generator-{replica}", follows=POLICY, suspendable=self)
        make = wiring.engines.generator
        if self._residence is None:
            self._generator = await make(wiring.config, wiring.max_length, replica)
            return
        assert self._channel is not None
        self._channel = ResidentChannel(self._channel, self._residence)
        # The engine takes its place among the ranks that are there.
        await self._residence.wait_for_trainer(wiring.config.generator.start_timeout_s)
        self._generator = await make(wiring.config, wiring.max_length, replica)
        await self._residence.let_in(self._generator, fills=wiring.config.fills_generators)

    async def suspend(self) -> None:
        """Sample nothing while others have the pool."""
        assert self._generator is not None
        await self._generator.suspend("lease")
        self._stages[0].spans.rest([stage.name for stage in self._stages])

    async def resume(self) -> None:
        """Go on with what was under way."""
        assert self._generator is not None
        self._stages[0].spans.go_on()
        await self._generator.resume("lease")

    async def run(self) -> None:
        """The loops of the stages, until the actor is killed or has left."""
        config, generator, held = self._config, self._generator, self._held
        assert generator is not None and held is not None
        places = shared_places(
            config.generator.max_concurrent_rollouts,
            [stage.name for stage in self._stages],
            group_size=config.algorithm.group_size,
        )
        loops = []
        for stage in self._stages:
            sample = generator.stages[stage.name]
            begun = generator.begun if stage.name == GENERATE.stage else nothing_begun
            loops.append(generate(stage, sample, held, places=places[stage.name], begun=begun))
        if self._residence is None:
            await self._serve(loops, generator)
        else:
            await self._serve(loops, ResidentFollower(generator, self._residence))

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Rollout]:
        """Rollouts for an evaluation of `version` (or a newer one)."""
        if self._generator is None:
            raise ActorLostError("this generator has died and is not yet back")
        assert self._held is not None
        await self._held.at_least(version)
        async with self._stages[0].lease.hold("evaluate"):
            return await self._generator.sample(prompt, seeds, sampling=sampling)

    async def life(self) -> LifeSign:
        """Answer once the engine has, which it does between two steps: a wedged one is silent."""
        if self._generator is not None:
            await self._generator.begun()
        return LifeSign.here()

    async def drain(self) -> ActorReport:
        """What this replica did since the last call."""
        if self._generator is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        return ActorReport(spans.process, spans.drain())


class PartActor(Replica):
    """Has a part of a generator that another process leads, and the trainer that fills it."""

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self._part: HostedPart | None = None

    async def start(self, wiring: Wiring, rank: int, calls: Sequence[Call]) -> None:
        """Load the part, as the leader loads the engine."""
        config = wiring.config
        self._take_place(wiring, calls, f"generator-{rank}", follows=POLICY)
        assert self._channel is not None
        self._channel = ResidentChannel(self._channel, self._residence)
        await self._residence.wait_for_trainer(config.generator.start_timeout_s)
        self._part = await wiring.engines.generator_part(config, wiring.max_length, rank)
        await self._residence.let_in_part(self._part)

    async def run(self) -> None:
        """Compute along, until the actor is killed or the leader is gone."""
        assert self._part is not None
        await self._serve([self._part.serve()], PartFollower(self._residence))
