"""Evaluation inside a run: the run's own generators and reward scorers, outside the stream."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.actors.actor_context import MAX_LEASE_WAIT_S
from streamrl.actors.coordination.step_reporter import RoleActors
from streamrl.actors.transport.ray_calls import await_reply
from streamrl.config import RunConfig
from streamrl.errors import (
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)
from streamrl.evaluation import EvaluationResult, evaluate_policy
from streamrl.messages import Columns, Experience, GroupLease, Prompt, Rollout, rollouts_to_columns
from streamrl.stream.device_lease import ProgressClock

RETRY_INTERVAL_S = 0.5
"""Between two calls of replicas that have died, s."""


class RunEvaluator:
    """Spreads an evaluation over the replicas there are, whoever joins or leaves meanwhile.

    Where it waits for devices that are shared, its deadlines count the time in which nothing moves
    there, as `pulse` has it.
    """

    def __init__(
        self, config: RunConfig, generators: RoleActors, scorers: RoleActors, pulse: ProgressClock
    ) -> None:
        self._config = config.evaluation
        # A generator that drains for the version first ends what it has begun.
        rounds = 2 if config.weights.on_update == "drain" else 1
        self._timeout_s = config.pipeline.stall_s + rounds * config.generator.request_timeout_s
        self._progress_clock = pulse
        self._can_restart = config.run.max_restarts > 0
        self._generators = RoundRobinReplicas(generators)
        self._scorers = RoundRobinReplicas(scorers)

    async def run_evaluation(
        self, prompts: Mapping[str, Sequence[Prompt]], version: int
    ) -> EvaluationResult:
        """How good `version` is on the prompts of each file."""

        async def generate(prompt: Prompt, seeds: Sequence[int]) -> list[Rollout]:
            arguments = (prompt, seeds, self._config.sampling, version)
            return list(await self._call_replica(self._generators, "sample", *arguments))

        async def score(prompt: Prompt, rollouts: list[Rollout]) -> Columns:
            group = _make_unqueued_group(prompt, rollouts, version)
            (columns,) = await self._call_replica(self._scorers, "score", [group])
            if isinstance(columns, StreamError):
                raise columns
            return dict(columns)

        return await evaluate_policy(
            prompts,
            generate=generate,
            score=score,
            config=self._config,
            timeout_s=self._timeout_s,
            patience=self._progress_clock.progress_timeout,
        )

    async def _call_replica(
        self, replicas: "RoundRobinReplicas", method: str, *arguments: Any
    ) -> Any:
        """What the next replica answers.

        One that died, or is about to be replaced, may be back before the time is over; for one
        that left, others answer.
        """
        deadline = None
        while True:
            name, actor = replicas.next_replica()
            reply = getattr(actor, method).remote(*arguments)
            try:
                return await self._await_reply(reply, f"{name}.{method}")
            except (ActorLostError, GenerationError, WeightsError):
                returns = self._can_restart or not replicas.has_replica(name)
                deadline = deadline or asyncio.get_running_loop().time() + self._timeout_s
                if not returns or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _await_reply(self, reply: Any, what: str) -> Any:
        try:
            async with self._progress_clock.progress_timeout(self._timeout_s):
                return await await_reply(reply, what, MAX_LEASE_WAIT_S)
        except TimeoutError:
            raise DeadlineError(
                f"{what}: no answer, and nothing has moved for {self._timeout_s:g} s"
            ) from None


class RoundRobinReplicas:
    """The replicas of a role, round and round, as many as there are just then."""

    def __init__(self, role: RoleActors) -> None:
        self._role = role
        self._next = 0

    def next_replica(self) -> tuple[str, Any]:
        """The next one with its name."""
        place = self._next % len(self._role.actors)
        self._next = place + 1
        return self._role.names[place], self._role.actors[place]

    def has_replica(self, name: str) -> bool:
        """Whether it has not left."""
        return name in self._role.names


def _make_unqueued_group(prompt: Prompt, rollouts: Sequence[Rollout], version: int) -> Experience:
    """A group that is in no queue, so that its lease means nothing."""
    lease = GroupLease(
        token=0, uid=prompt.uid, stage="evaluate", attempt=0, expires_at=float("inf")
    )
    return Experience(lease, version, prompt=prompt, columns=rollouts_to_columns(rollouts))
