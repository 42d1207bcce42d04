"""Evaluation during a run, on the run's own generators and reward scorers, outside the stream."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.actors.actor_context import MAX_LEASE_WAIT_S
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.transport.ray_calls import await_reply, call_actor
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import GENERATE_CALL, REWARD_CALL
from streamrl.engines.generator_config import SamplingSettings
from streamrl.errors import ActorLostError, GenerationError, StreamError, WeightsError
from streamrl.messages import Columns, Experience, Prompt
from streamrl.stream.evaluation.metrics import EvaluationResult
from streamrl.stream.evaluation.sample_and_score import SampledPrompt, evaluate_policy

RETRY_INTERVAL_S = 0.5


class RunEvaluator:
    """Evaluates a version on the run's own generators and reward scorers.

    Replicas may join or leave during an evaluation. They limit their own work: the wait for a
    token, a reward or the devices. So a call may take any time while its replica answers pings.
    """

    def __init__(
        self,
        config: RunConfig,
        roles: Mapping[str, RoleActors],
        sampling: SamplingSettings | None = None,
    ) -> None:
        """Create an evaluator; sampling: None: that of evaluations."""
        self._config, self._sampling = config.evaluation, sampling or config.evaluation.sampling
        self._ping_every_s = config.pipeline.stall_s
        self._timeout_s = config.pipeline.stall_s + config.generator.request_timeout_s
        self._can_restart = config.run.max_restarts > 0
        self._roles = roles
        self._turns: Counter[str] = Counter()

    async def run_evaluation(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        version: int,
        on_scored: Callable[[], None] = lambda: None,
    ) -> EvaluationResult:
        """Sample and score evaluation prompts, given by data set, with `version` or a newer one.

        on_scored: called for each prompt that has scores.
        """

        async def generate(prompt: Prompt, seeds: Sequence[int]) -> SampledPrompt:
            generators, sampling = self._roles[GENERATE_CALL.role], self._sampling
            arguments = (prompt, seeds, sampling, version)
            sampled = await self._call_replica(generators, "sample", *arguments)
            assert isinstance(sampled, SampledPrompt)
            return sampled

        async def score(prompt: Prompt, rollouts: Columns) -> Columns:
            group = Experience.make_unqueued(rollouts, prompt, version)
            (scored,) = await self._call_replica(self._roles[REWARD_CALL.role], "score", [group])
            if isinstance(scored, StreamError):
                raise scored
            on_scored()
            return dict(scored)

        return await evaluate_policy(prompts, generate=generate, score=score, config=self._config)

    def choose_replica(self, role: RoleActors) -> tuple[str, Any]:
        """Return the name and the actor of the next replica of a role in turn."""
        index = self._turns[role.role] % len(role.actors)
        self._turns[role.role] = index + 1
        return role.names[index], role.actors[index]

    async def _call_replica(self, role: RoleActors, method: str, *arguments: Any) -> Any:
        """Call a method of the next replica in turn; on failure retry with the replica after that.

        A dead replica may restart before the timeout. If a replica left the run, another takes the
        call.
        """
        deadline = None
        while True:
            name, actor = self.choose_replica(role)
            try:
                return await self._call_actor(name, actor, method, *arguments)
            except (ActorLostError, GenerationError, WeightsError):
                may_recover = self._can_restart or name not in role.names
                deadline = deadline or asyncio.get_running_loop().time() + self._timeout_s
                if not may_recover or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _call_actor(self, name: str, actor: Any, method: str, *arguments: Any) -> Any:
        """Call a method; raise DeadlineError once the actor does not answer a ping in time."""
        call = call_actor(actor, name, method, *arguments, timeout_s=MAX_LEASE_WAIT_S)
        waiting = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({waiting}, timeout=self._ping_every_s))[0]:
                await await_reply(actor.ping.remote(), f"{name}.{method}: ping", self._timeout_s)
            return waiting.result()
        finally:
            waiting.cancel()
