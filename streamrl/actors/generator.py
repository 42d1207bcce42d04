"""Generator replica: an actor that samples rollouts and follows the weights of the policy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.liveness import ProcessLocation
from streamrl.actors.replica import ReplicaActor
from streamrl.actors.shared_weights import SharedWeights
from streamrl.dataflow import GENERATE_CALL, POLICY, ModelCall
from streamrl.engines.generator_config import SamplingSettings
from streamrl.errors import ActorLostError
from streamrl.messages import Prompt, Rollout
from streamrl.pipeline import generate_rollouts
from streamrl.stream.stage_worker import read_no_partials, split_slots

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.vllm.follower_rank import FollowerRank


class GeneratorActor(ReplicaActor):
    """Actor that runs an engine and the loops of its stages: leases prompts, commits rollouts."""

    def __init__(self, shared_weights: SharedWeights | None = None) -> None:
        """Create an actor without an engine; `start` loads the engine.

        shared_weights: weights that a trainer in this process shares with the generator, if any.
        """
        self._generator: GenerationEngine | None = None
        self._shared_weights = shared_weights

    async def start(self, context: ActorContext, replica: int, calls: Sequence[ModelCall]) -> None:
        """Load the engine. The actor samples nothing until `run` has loaded the current version."""
        config, shared = context.config, self._shared_weights
        self._config = config
        self._join_stream(context, calls, f"generator-{replica}", follows=POLICY, suspendable=self)
        if shared is not None:
            # The engine joins the trainer's process group, so all ranks must exist.
            await shared.wait_for_trainer(config.generator.start_timeout_s)
        self._generator = await context.engines.make_generator(config, context.max_length, replica)
        if shared is not None:
            await shared.attach_generator(
                self._generator, should_fill_storage=config.needs_resharding
            )

    async def suspend(self) -> None:
        """Pause the engine while another phase computes on the shared device pool."""
        assert self._generator is not None
        await self._generator.pause("lease")
        self._stages[0].spans.pause_spans([stage.name for stage in self._stages])

    async def resume(self) -> None:
        """Continue decoding after `suspend`."""
        assert self._generator is not None
        self._stages[0].spans.resume_spans()
        await self._generator.resume("lease")

    async def run(self) -> None:
        """Lease prompts and sample their rollouts until the run ends or the actor drains."""
        config, generator, served = self._config, self._generator, self._served_version
        assert generator is not None and served is not None
        slots = split_slots(
            config.generator.max_concurrent_rollouts,
            [stage.name for stage in self._stages],
            group_size=config.algorithm.group_size,
        )
        loops = []
        for stage in self._stages:
            sample = generator.stages[stage.name]
            collect_partials = (
                generator.collect_partial_rollouts
                if stage.name == GENERATE_CALL.stage
                else read_no_partials
            )
            loops.append(
                generate_rollouts(
                    stage, sample, served, limit=slots[stage.name], read_partials=collect_partials
                )
            )
        await self._run_loops(loops, self._shared_weights or generator)

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingSettings, version: int
    ) -> list[Rollout]:
        """Sample a rollout of an evaluation prompt per seed, with `version` or a newer one."""
        if self._generator is None:
            raise ActorLostError("this generator died and has not restarted yet")
        assert self._served_version is not None
        await self._served_version.wait_for_version(version)
        async with self._stages[0].device_lease.hold("evaluate"):
            return await self._generator.generate(prompt.token_ids, seeds=seeds, sampling=sampling)

    async def ping(self) -> ProcessLocation:
        """Reply once the engine replies between two decode steps.

        So a hung engine makes the actor silent, although the event loop still runs.
        """
        if self._generator is not None:
            await self._generator.collect_partial_rollouts()
        return ProcessLocation.from_this_process()

    async def collect_report(self) -> ActorReport:
        if self._generator is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        return ActorReport(spans.process, spans.drain_spans())


class FollowerRankActor(ReplicaActor):
    """Actor with one rank of a generator that spans several processes; another process leads."""

    _shared_weights: SharedWeights

    def __init__(self, shared_weights: SharedWeights) -> None:
        self._shared_weights = shared_weights
        self._follower_rank: FollowerRank | None = None

    async def start(self, context: ActorContext, rank: int, calls: Sequence[ModelCall]) -> None:
        config = context.config
        self._join_stream(context, calls, f"generator-{rank}", follows=POLICY)
        await self._shared_weights.wait_for_trainer(config.generator.start_timeout_s)
        self._follower_rank = await context.engines.make_follower_rank(
            config, context.max_length, rank
        )
        await self._shared_weights.attach_follower_rank(self._follower_rank)

    async def run(self) -> None:
        """Compute each engine step together with the leader, until the leader exits."""
        assert self._follower_rank is not None
        await self._run_loops([self._follower_rank.wait_until_closed()], self._shared_weights)
