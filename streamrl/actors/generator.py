"""A generator replica: hosts the loops of the generating stages and follows the weights."""

from collections.abc import Sequence

from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.liveness import ProcessLocation
from streamrl.actors.protocols import HostedFollowerRank, HostedGenerator
from streamrl.actors.replica import ReplicaActor
from streamrl.actors.shared_weights import (
    PrefilledFollower,
    SharedWeights,
    SharedWeightsChannel,
    SharedWeightsFollower,
)
from streamrl.dataflow import GENERATE_CALL, POLICY, ModelCall
from streamrl.engines.generator_config import SamplingSettings
from streamrl.errors import ActorLostError
from streamrl.messages import Prompt, Rollout
from streamrl.pipeline import generate_rollouts
from streamrl.stream.stage_worker import read_no_partials, split_slots


class GeneratorActor(ReplicaActor):
    """Long-lived: engine and loops live as long as the run, or as the process does."""

    def __init__(self, residence: SharedWeights | None = None) -> None:
        """`residence` is there if a trainer shares this process, and the weights."""
        self._generator: HostedGenerator | None = None
        self._shared_weights = residence

    async def start(self, wiring: ActorContext, replica: int, calls: Sequence[ModelCall]) -> None:
        """Load the engine. It serves nothing until `run` has pulled the current version."""
        self._config = wiring.config
        self._join_stream(wiring, calls, f"generator-{replica}", follows=POLICY, suspendable=self)
        make = wiring.engines.make_generator
        if self._shared_weights is None:
            self._generator = await make(wiring.config, wiring.max_length, replica)
            return
        assert self._channel is not None
        self._channel = SharedWeightsChannel(self._channel, self._shared_weights)
        # The engine takes its place among the ranks that are there.
        await self._shared_weights.wait_for_trainer(wiring.config.generator.start_timeout_s)
        self._generator = await make(wiring.config, wiring.max_length, replica)
        await self._shared_weights.attach_generator(
            self._generator, fills=wiring.config.needs_resharding
        )

    async def suspend(self) -> None:
        """Sample nothing while others have the pool."""
        assert self._generator is not None
        await self._generator.pause("lease")
        self._stages[0].spans.pause_spans([stage.name for stage in self._stages])

    async def resume(self) -> None:
        """Go on with what was under way."""
        assert self._generator is not None
        self._stages[0].spans.resume_spans()
        await self._generator.resume("lease")

    async def run(self) -> None:
        """The loops of the stages, until the actor is killed or has left."""
        config, generator, held = self._config, self._generator, self._held_version
        assert generator is not None and held is not None
        places = split_slots(
            config.generator.max_concurrent_rollouts,
            [stage.name for stage in self._stages],
            group_size=config.algorithm.group_size,
        )
        loops = []
        for stage in self._stages:
            sample = generator.stages[stage.name]
            begun = (
                generator.collect_partial_rollouts
                if stage.name == GENERATE_CALL.stage
                else read_no_partials
            )
            loops.append(
                generate_rollouts(
                    stage, sample, held, limit=places[stage.name], read_partials=begun
                )
            )
        if self._shared_weights is None:
            await self._run_loops(loops, generator)
        else:
            await self._run_loops(loops, SharedWeightsFollower(generator, self._shared_weights))

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingSettings, version: int
    ) -> list[Rollout]:
        """Rollouts for an evaluation of `version` (or a newer one)."""
        if self._generator is None:
            raise ActorLostError("this generator has died and is not yet back")
        assert self._held_version is not None
        await self._held_version.wait_for_version(version)
        async with self._stages[0].device_lease.hold("evaluate"):
            return await self._generator.sample(prompt, seeds, sampling=sampling)

    async def ping(self) -> ProcessLocation:
        """Answer once the engine has, which it does between two steps: a wedged one is silent."""
        if self._generator is not None:
            await self._generator.collect_partial_rollouts()
        return ProcessLocation.from_this_process()

    async def collect_report(self) -> ActorReport:
        """What this replica did since the last call."""
        if self._generator is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        return ActorReport(spans.process, spans.drain_spans())


class FollowerRankActor(ReplicaActor):
    """Has a part of a generator that another process leads, and the trainer that fills it."""

    def __init__(self, residence: SharedWeights) -> None:
        self._shared_weights = residence
        self._follower_rank: HostedFollowerRank | None = None

    async def start(self, wiring: ActorContext, rank: int, calls: Sequence[ModelCall]) -> None:
        """Load the part, as the leader loads the engine."""
        config = wiring.config
        self._join_stream(wiring, calls, f"generator-{rank}", follows=POLICY)
        assert self._channel is not None
        self._channel = SharedWeightsChannel(self._channel, self._shared_weights)
        await self._shared_weights.wait_for_trainer(config.generator.start_timeout_s)
        self._follower_rank = await wiring.engines.make_follower_rank(
            config, wiring.max_length, rank
        )
        await self._shared_weights.attach_follower_rank(self._follower_rank)

    async def run(self) -> None:
        """Compute along, until the actor is killed or the leader is gone."""
        assert self._follower_rank is not None
        await self._run_loops(
            [self._follower_rank.run_rank()], PrefilledFollower(self._shared_weights)
        )
