"""Evaluation inside a run: the run's own generators and reward scorers, outside the stream."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from streamrl.actors.calls import call
from streamrl.config import RunConfig
from streamrl.errors import ActorLostError, StreamError
from streamrl.evaluation import EvaluationResult, evaluate
from streamrl.messages import Columns, Experience, Lease, Prompt, Rollout, group_columns

RETRY_S = 0.5
"""Between two calls of replicas that have died, s."""


class Evaluator:
    """Spreads an evaluation over the replicas."""

    def __init__(
        self, config: RunConfig, generators: Sequence[Any], scorers: Sequence[Any]
    ) -> None:
        self._config = config.evaluation
        self._attempts = config.queue.max_attempts
        self._timeout_s = config.pipeline.stall_s + config.generator.request_timeout_s
        self._returns = config.run.max_restarts > 0
        self._generators = _in_turn("generator", generators)
        self._scorers = _in_turn("reward", scorers)

    async def run(self, prompts: Sequence[Prompt], version: int) -> EvaluationResult:
        """How good `version` is on the prompts."""

        async def generate(prompt: Prompt, seeds: Sequence[int]) -> list[Rollout]:
            arguments = (prompt, seeds, self._config.temperature, version)
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
            attempts=self._attempts,
        )

    async def _ask(self, replicas: Iterator[tuple[str, Any]], method: str, *arguments: Any) -> Any:
        """What the next replica answers. One that died may be back before the time is over."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            name, actor = next(replicas)
            reply = getattr(actor, method).remote(*arguments)
            try:
                return await call(reply, f"{name}.{method}", self._timeout_s)
            except ActorLostError:
                if not self._returns or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)


def _in_turn(role: str, actors: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The replicas of a role with their names, round and round."""
    return itertools.cycle([(f"{role}-{i}", actor) for i, actor in enumerate(actors)])


def _outside(prompt: Prompt, rollouts: Sequence[Rollout], version: int) -> Experience:
    """A group that is in no queue, so that its lease means nothing."""
    lease = Lease(token=0, uid=prompt.uid, stage="evaluate", attempt=0, expires_at=float("inf"))
    return Experience(lease, version, prompt=prompt, columns=group_columns(rollouts))
