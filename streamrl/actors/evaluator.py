"""Evaluation inside a run: the run's own generators and reward scorers, outside the stream."""

import itertools
from collections.abc import Sequence
from typing import Any

from streamrl.actors.calls import call
from streamrl.config import RunConfig
from streamrl.errors import StreamError
from streamrl.evaluation import EvaluationResult, evaluate
from streamrl.messages import Columns, Experience, Lease, Prompt, Rollout, group_columns


class Evaluator:
    """Spreads an evaluation over the replicas."""

    def __init__(
        self, config: RunConfig, generators: Sequence[Any], scorers: Sequence[Any]
    ) -> None:
        self._config = config.evaluation
        self._attempts = config.queue.max_attempts
        self._timeout_s = config.pipeline.stall_s + config.generator.request_timeout_s
        self._generators = itertools.cycle(enumerate(generators))
        self._scorers = itertools.cycle(enumerate(scorers))

    async def run(self, prompts: Sequence[Prompt], version: int) -> EvaluationResult:
        """How good `version` is on the prompts."""

        async def generate(prompt: Prompt, seeds: Sequence[int]) -> list[Rollout]:
            replica, actor = next(self._generators)
            reply = actor.sample.remote(prompt, seeds, self._config.temperature, version)
            return list(await call(reply, f"generator-{replica}.sample", self._timeout_s))

        async def score(prompt: Prompt, rollouts: list[Rollout]) -> Columns:
            replica, actor = next(self._scorers)
            reply = actor.score.remote([_outside(prompt, rollouts, version)])
            (columns,) = await call(reply, f"reward-{replica}.score", self._timeout_s)
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


def _outside(prompt: Prompt, rollouts: Sequence[Rollout], version: int) -> Experience:
    """A group that is in no queue, so that its lease means nothing."""
    lease = Lease(token=0, uid=prompt.uid, stage="evaluate", attempt=0, expires_at=float("inf"))
    return Experience(lease, version, prompt=prompt, columns=group_columns(rollouts))
