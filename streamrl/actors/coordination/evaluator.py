"""Evaluation inside a run: the run's own generators and reward scorers, outside the stream."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.actors.actor_context import LONGEST_TURN_S
from streamrl.actors.coordination.step_reporter import RoleActors
from streamrl.actors.transport.ray_calls import call
from streamrl.config import RunConfig
from streamrl.errors import (
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)
from streamrl.evaluation import EvaluationResult, evaluate
from streamrl.messages import Columns, Experience, Lease, Prompt, Rollout, group_columns
from streamrl.stream.device_lease import Pulse

RETRY_S = 0.5
"""Between two calls of replicas that have died, s."""


class Evaluator:
    """Spreads an evaluation over the replicas there are, whoever joins or leaves meanwhile.

    Where it waits for devices that are shared, its deadlines count the time in which nothing moves
    there, as `pulse` has it.
    """

    def __init__(
        self, config: RunConfig, generators: RoleActors, scorers: RoleActors, pulse: Pulse
    ) -> None:
        self._config = config.evaluation
        # A generator that drains for the version first ends what it has begun.
        rounds = 2 if config.weights.on_update == "drain" else 1
        self._timeout_s = config.pipeline.stall_s + rounds * config.generator.request_timeout_s
        self._pulse = pulse
        self._returns = config.run.max_restarts > 0
        self._generators = InTurn(generators)
        self._scorers = InTurn(scorers)

    async def run(self, prompts: Mapping[str, Sequence[Prompt]], version: int) -> EvaluationResult:
        """How good `version` is on the prompts of each file."""

        async def generate(prompt: Prompt, seeds: Sequence[int]) -> list[Rollout]:
            arguments = (prompt, seeds, self._config.sampling, version)
            return list(await self._ask(self._generators, "sample", *arguments))

        async def score(prompt: Prompt, rollouts: list[Rollout]) -> Columns:
            group = _outside(prompt, rollouts, version)
            (columns,) = await self._ask(self._scorers, "score", [group])
            if isinstance(columns, StreamError):
                raise columns
            return dict(columns)

        return await evaluate(
            prompts,
            generate=generate,
            score=score,
            config=self._config,
            timeout_s=self._timeout_s,
            patience=self._pulse.patience,
        )

    async def _ask(self, replicas: "InTurn", method: str, *arguments: Any) -> Any:
        """What the next replica answers.

        One that died, or is about to be replaced, may be back before the time is over; for one
        that left, others answer.
        """
        deadline = None
        while True:
            name, actor = replicas.next()
            reply = getattr(actor, method).remote(*arguments)
            try:
                return await self._answer(reply, f"{name}.{method}")
            except (ActorLostError, GenerationError, WeightsError):
                returns = self._returns or not replicas.has(name)
                deadline = deadline or asyncio.get_running_loop().time() + self._timeout_s
                if not returns or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _answer(self, reply: Any, what: str) -> Any:
        try:
            async with self._pulse.patience(self._timeout_s):
                return await call(reply, what, LONGEST_TURN_S)
        except TimeoutError:
            raise DeadlineError(
                f"{what}: no answer, and nothing has moved for {self._timeout_s:g} s"
            ) from None


class InTurn:
    """The replicas of a role, round and round, as many as there are just then."""

    def __init__(self, role: RoleActors) -> None:
        self._role = role
        self._next = 0

    def next(self) -> tuple[str, Any]:
        """The next one with its name."""
        place = self._next % len(self._role.actors)
        self._next = place + 1
        return self._role.names[place], self._role.actors[place]

    def has(self, name: str) -> bool:
        """Whether it has not left."""
        return name in self._role.names


def _outside(prompt: Prompt, rollouts: Sequence[Rollout], version: int) -> Experience:
    """A group that is in no queue, so that its lease means nothing."""
    lease = Lease(token=0, uid=prompt.uid, stage="evaluate", attempt=0, expires_at=float("inf"))
    return Experience(lease, version, prompt=prompt, columns=group_columns(rollouts))
