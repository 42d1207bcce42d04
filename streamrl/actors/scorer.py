"""A scorer replica of any role (reward, cost, reference, value): hosts the loops of its stages."""

import asyncio
import os
from collections.abc import Sequence

import ray

from streamrl.actors.engine_factory import HostedScorer
from streamrl.actors.wiring import ActorReport, Wiring
from streamrl.dataflow import MOVED, REWARD, Call
from streamrl.errors import ActorLostError
from streamrl.messages import Experience
from streamrl.pipeline import Serving, follow_weights, score
from streamrl.serving import Result
from streamrl.weights import HeldVersion


def _same(version: int) -> int:
    return version


@ray.remote
class ScorerActor:
    """Long-lived: models and reward workers live as long as the run, or as the process does."""

    def __init__(self) -> None:
        self._scorer: HostedScorer | None = None

    async def start(self, wiring: Wiring, replica: int, calls: Sequence[Call]) -> None:
        """Load what the stages score with."""
        self._config = wiring.config
        self._calls = calls
        role, follows = calls[0].role, calls[0].follows
        name = self._name = f"{role}-{replica}"
        self._stages = wiring.stages(calls, name)
        due = self._config.reference.version_for if follows == MOVED else _same
        self._held = HeldVersion(name, due=due) if follows else None
        self._channel = wiring.channel(name, follows) if follows else None
        self._scorer = await wiring.engines.scorer(wiring.config, role)

    async def run(self) -> None:
        """The loops of the stages, until the actor is killed or has left."""
        scorer, held, channel = self._scorer, self._held, self._channel
        assert scorer is not None
        batch = self._config.scorer.max_groups
        async with asyncio.TaskGroup() as tasks:
            following = []
            if held is not None and channel is not None and scorer.follower is not None:
                follow = follow_weights(self._stages[0], scorer.follower, channel, held)
                following.append(tasks.create_task(follow))
            loops = []
            for stage, call in zip(self._stages, self._calls, strict=True):
                judge, serving = scorer.stages[stage.name], Serving(call.needs, 2 * batch, batch)
                loop = score(stage, judge, serving, held=held)
                loops.append(tasks.create_task(loop))
            await asyncio.wait(loops)
            for task in following:
                task.cancel()
        await self._stages[0].queue.release(self._name, died=False)

    async def leave(self) -> None:
        """Take nothing more; `run` ends once what is held is back in the queue."""
        self._stages[0].leaving.set()

    async def fail(self) -> None:
        """End this process as a death would: what it serves is not to be trusted any more."""
        os._exit(1)

    async def serving(self) -> int:
        """Which version is held, once there is one; -1 if the stages follow no model."""
        if self._held is None:
            return -1
        return await self._held.at_least(0)

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """Score groups that are not in the queue: those of an evaluation."""
        if self._scorer is None:
            raise ActorLostError("this scorer has died and is not yet back")
        return await self._scorer.stages[REWARD.stage](experiences)

    async def drain(self) -> ActorReport:
        """What this replica did since the last call, with a few scored texts."""
        if self._scorer is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        return ActorReport(spans.process, spans.drain(), self._scorer.drain_samples())
