"""Generator actors, which sample rollouts: replicas, and those that share a trainer's process."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from operator import methodcaller
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.liveness import PingableActor, ProcessLocation
from streamrl.actors.replica import ReplicaActor
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import TrainerActor
from streamrl.dataflow import GENERATE_CALL, POLICY, ModelCall
from streamrl.engines.generator_config import SamplingSettings
from streamrl.environments.episodes.driver import (
    EpisodeDriver,
    make_environment_seed,
    start_episode_driver,
)
from streamrl.errors import ActorLostError
from streamrl.messages import Columns, Prompt, make_rollout_seeds, rollouts_to_columns
from streamrl.pipeline import generate_rollouts, hold_devices_per_group
from streamrl.stream.evaluation.sample_and_score import SampledPrompt
from streamrl.stream.protocols import (
    FinishedCallback,
    ReadPartialRollouts,
    SampleFunction,
    StageContext,
)
from streamrl.stream.stage_worker import read_no_partials, split_slots
from streamrl.telemetry.spans import SpanArgValue

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.vllm.peer_rank import PeerRank


class GeneratorActor(ReplicaActor):
    """Actor that runs an engine and the loops of its stages: leases prompts, commits rollouts."""

    def __init__(self, shared_weights: SharedWeights | None = None) -> None:
        """Create an actor without an engine; `start` loads the engine.

        shared_weights: weights that a trainer in this process shares with the generator, if any.
        """
        self._generator: GenerationEngine | None = None
        self._driver: EpisodeDriver | None = None
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
        if config.environment.is_enabled:
            settings = config.environment, config.data, config.generator
            self._driver = await start_episode_driver(*settings, self._generator, config.model.path)

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
            config.max_open_rollouts,
            [stage.name for stage in self._stages],
            group_size=config.algorithm.group_size,
        )
        loops = []
        for stage in self._stages:
            sample, read_partials = self._make_sample_function(generator, stage)
            loops.append(
                generate_rollouts(
                    stage, sample, served, limit=slots[stage.name], read_partials=read_partials
                )
            )
        try:
            await self._run_loops(loops, self._shared_weights or generator)
        finally:
            if self._driver is not None:
                await self._driver.close()

    def _make_sample_function(
        self, generator: "GenerationEngine", stage: StageContext
    ) -> tuple[SampleFunction, ReadPartialRollouts]:
        """Return what samples the groups of a stage, and what reads their partial rollouts.

        Without an environment the engine samples whole groups; otherwise the driver runs episodes.
        """
        if self._driver is None:
            is_resumable = stage.name == GENERATE_CALL.stage
            read_partials = generator.collect_partial_rollouts if is_resumable else read_no_partials
            return hold_devices_per_group(stage, generator.stages[stage.name]), read_partials
        driver, config = self._driver, self._config

        async def run_episodes(
            prompt: Prompt, partial_rollouts: Columns | None, on_finished: FinishedCallback
        ) -> Columns:
            seed = config.run.seed
            return await driver.run_group(
                prompt,
                seeds=make_rollout_seeds(seed, prompt.uid, config.algorithm.group_size),
                environment_seed=make_environment_seed(seed, prompt.uid),
                compute=stage.hold_devices,
                on_finished=on_finished,
            )

        # An interrupted episode begins anew: its environment's state is not saved.
        return run_episodes, read_no_partials

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: SamplingSettings, version: int
    ) -> SampledPrompt:
        """Sample a rollout of an evaluation prompt per seed, with `version` or a newer one.

        Episodes whose environment fails are left out. Raises EpisodeError if all do, and
        ActorLostError or GenerationError if another generator has to sample the prompt.
        """
        if self._generator is None:
            raise ActorLostError("this generator died and has not restarted yet")
        assert self._served_version is not None
        await self._served_version.wait_for_version(version)
        if self._driver is not None:
            episodes = await self._driver.run_evaluation(
                prompt,
                seeds=seeds,
                environment_seed=make_environment_seed(self._config.evaluation.seed, prompt.uid),
                compute=self._hold_for_evaluation,
                sampling=sampling,
            )
            return SampledPrompt(*episodes)
        async with self._hold_for_evaluation():
            rollouts = await self._generator.generate(
                prompt.token_ids, seeds=seeds, sampling=sampling
            )
            return SampledPrompt(rollouts_to_columns(rollouts))

    @asynccontextmanager
    async def _hold_for_evaluation(self, **facts: SpanArgValue) -> AsyncIterator[dict[str, Any]]:
        """Hold the device lease without a span: evaluation is not work of the stage."""
        async with self._stages[0].device_lease.hold("evaluate"):
            yield {}

    async def describe_waits(self) -> str:
        """Return what the open episodes wait for; "" if none waits for its environment."""
        return "" if self._driver is None else self._driver.meter.describe_waits()

    async def ping(self) -> ProcessLocation:
        """Reply once the engine replies between two decode steps, or while it loads weights.

        So a hung engine makes the actor silent, although the event loop still runs. A load has a
        deadline of its own.
        """
        if self._generator is not None:
            await self._generator.wait_until_responsive()
        return ProcessLocation.from_this_process()

    async def collect_report(self) -> ActorReport:
        if self._generator is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        counts = {} if self._driver is None else self._driver.meter.drain_counts()
        return ActorReport(spans.process, spans.drain_spans(), counts=counts)


class PeerRankActor(ReplicaActor):
    """Actor with one rank of a generator that spans several processes; another process leads."""

    _shared_weights: SharedWeights

    def __init__(self, shared_weights: SharedWeights) -> None:
        self._shared_weights = shared_weights
        self._peer_rank: PeerRank | None = None

    async def start(self, context: ActorContext, rank: int, calls: Sequence[ModelCall]) -> None:
        config = context.config
        self._join_stream(context, calls, f"generator-{rank}", follows=POLICY)
        await self._shared_weights.wait_for_trainer(config.generator.start_timeout_s)
        self._peer_rank = await context.engines.make_peer_rank(config, context.max_length, rank)
        await self._shared_weights.attach_peer_rank(self._peer_rank)

    async def run(self) -> None:
        """Compute each engine step together with the leader, until the leader exits."""
        assert self._peer_rank is not None
        await self._run_loops([self._peer_rank.wait_until_closed()], self._shared_weights)


class HybridActor(PingableActor):
    """Actor that hosts a TrainerActor and a generator actor, which share the weights in place.

    Callers address either actor by a HybridActorHandle.
    """

    def __init__(self, leads: bool = True) -> None:
        """Create the hosted actors.

        leads: host a GeneratorActor, which runs the engine; otherwise a PeerRankActor, which
        computes for a generator that another process leads.
        """
        shared_weights = SharedWeights()
        generator = GeneratorActor(shared_weights) if leads else PeerRankActor(shared_weights)
        self._role_actors = {"trainer": TrainerActor(shared_weights), "generator": generator}

    async def call_role(self, role: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the hosted actor of a role, "trainer" or "generator"."""
        return await methodcaller(method, *arguments)(self._role_actors[role])


class HybridActorHandle:
    """Handle of the trainer or of the generator in a HybridActor, used like a Ray actor handle."""

    def __init__(self, actor: Any, role: str) -> None:
        self.actor = actor
        self._role = role

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            return self.actor.call_role.remote(self._role, method, arguments)

        return SimpleNamespace(remote=call)

    def __reduce__(self) -> Any:
        return HybridActorHandle, (self.actor, self._role)
