"""A scorer replica of any kind (reward, reference, value): hosts the score loop of its stage."""

import asyncio
from collections.abc import Sequence
from typing import cast

import ray

from streamrl.actors.engine_factory import HostedScorer, HostedShadow
from streamrl.actors.wiring import ActorReport, RemoteChannel, Wiring
from streamrl.dataflow import FOLLOWED, Call
from streamrl.errors import ActorLostError
from streamrl.messages import Experience
from streamrl.pipeline import Serving, follow_weights, score
from streamrl.serving import Result
from streamrl.weights import HeldVersion


@ray.remote
class ScorerActor:
    """Long-lived: models and reward workers live as long as the run, or as the process does."""

    def __init__(self) -> None:
        self._scorer: HostedScorer | None = None

    async def start(self, wiring: Wiring, replica: int, call: Call) -> None:
        """Load what the stage scores with."""
        self._config = wiring.config
        self._call = call
        name = f"{call.role}-{replica}"
        self._stage = wiring.stage(call.stage, name)
        self._held, self._channel = None, None
        if call.role in FOLLOWED:
            self._held = HeldVersion(name)
            self._channel = RemoteChannel(wiring.coordinator, name, FOLLOWED[call.role])
        self._scorer = await wiring.engines.scorer(wiring.config, call.role)

    async def run(self) -> None:
        """The loops of the stage, until the actor is killed."""
        scorer, stage, held = self._scorer, self._stage, self._held
        assert scorer is not None
        batch = self._config.scorer.max_groups
        serving = Serving(self._call.needs, slots=2 * batch, batch=batch)
        stall_s = self._config.pipeline.stall_s
        async with asyncio.TaskGroup() as tasks:
            if held is not None and self._channel is not None:
                shadow = cast(HostedShadow, scorer)
                tasks.create_task(follow_weights(stage, shadow, self._channel, held))
            tasks.create_task(score(stage, scorer, serving, held=held, stall_s=stall_s))

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]:
        """Score groups that are not in the queue: those of an evaluation."""
        if self._scorer is None:
            raise ActorLostError("this scorer has died and is not yet back")
        return await self._scorer.score(experiences)

    async def drain(self) -> ActorReport:
        """What this replica did since the last call, with a few scored texts."""
        if self._scorer is None:
            return ActorReport("", ())
        spans = self._stage.spans
        return ActorReport(spans.process, spans.drain(), self._scorer.drain_samples())
