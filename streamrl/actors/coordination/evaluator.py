"""Evaluation during a run, on the run's own generators and reward scorers, outside the stream."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from streamrl.actors.actor_context import MAX_LEASE_WAIT_S
from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.transport.ray_calls import await_reply
from streamrl.config.run_config import RunConfig
from streamrl.errors import (
    ActorLostError,
    DeadlineError,
    GenerationError,
    StreamError,
    WeightsError,
)
from streamrl.messages import Columns, Experience, Prompt
from streamrl.stream.device_lease import ProgressClock
from streamrl.stream.evaluation.metrics import EvaluationResult
from streamrl.stream.evaluation.sample_and_score import SampledPrompt, evaluate_policy

RETRY_INTERVAL_S = 0.5


class RunEvaluator:
    """Evaluates a version on the run's own generators and reward scorers.

    Replicas may join or leave during an evaluation. Timeouts count only time in which no generator
    samples a token, and no holder of the shared devices finishes a piece of work (`ProgressClock`).
    """

    def __init__(
        self,
        config: RunConfig,
        generators: RoleActors,
        scorers: RoleActors,
        progress_clock: ProgressClock,
    ) -> None:
        self._config = config.evaluation
        self._timeout_s = config.pipeline.stall_s + config.generator.request_timeout_s
        self._progress_clock = progress_clock
        self._token_counts: dict[str, Mapping[str, int]] = {}
        self._sampled_at = -math.inf
        self._can_restart = config.run.max_restarts > 0
        self._generators, self._scorers = generators, scorers
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
            arguments = (prompt, seeds, self._config.sampling, version)
            sampled = await self._call_replica(self._generators, "sample", *arguments)
            assert isinstance(sampled, SampledPrompt)
            return sampled

        async def score(prompt: Prompt, rollouts: Columns) -> Columns:
            group = Experience.make_unqueued(rollouts, prompt, version)
            (scored,) = await self._call_replica(self._scorers, "score", [group])
            if isinstance(scored, StreamError):
                raise scored
            on_scored()
            return dict(scored)

        watching = asyncio.create_task(self._watch_sampling())
        try:
            return await evaluate_policy(
                prompts, generate=generate, score=score, config=self._config
            )
        finally:
            watching.cancel()

    async def _watch_sampling(self) -> None:
        """Look every now and then, forever, whether the generators sample tokens."""
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            names, actors = self._generators.names, self._generators.actors
            await asyncio.gather(*map(self._look_at_generator, names, actors))

    async def _look_at_generator(self, name: str, generator: Any) -> None:
        reply, call_name = generator.count_tokens.remote(), f"{name}.count_tokens"
        counts: Mapping[str, int] = {}
        # A dead or hung generator samples nothing.
        with suppress(StreamError):
            counts = await await_reply(reply, call_name, self._timeout_s / 4)
        if counts and counts != self._token_counts.get(name):
            self._sampled_at = asyncio.get_running_loop().time()
        self._token_counts[name] = counts

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
            reply = getattr(actor, method).remote(*arguments)
            try:
                return await self._await_reply(reply, f"{name}.{method}")
            except (ActorLostError, GenerationError, WeightsError):
                may_recover = self._can_restart or name not in role.names
                deadline = deadline or asyncio.get_running_loop().time() + self._timeout_s
                if not may_recover or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _await_reply(self, reply: Any, call_name: str) -> Any:
        now = asyncio.get_running_loop().time
        waiting = asyncio.ensure_future(await_reply(reply, call_name, MAX_LEASE_WAIT_S))
        try:
            while True:
                with suppress(TimeoutError):
                    async with self._progress_clock.progress_timeout(self._timeout_s):
                        return await asyncio.shield(waiting)
                if now() - self._sampled_at > self._timeout_s:
                    raise DeadlineError(
                        f"{call_name}: no answer, no new token and no progress on the devices for"
                        f" {self._timeout_s:g} s"
                    )
        finally:
            waiting.cancel()
