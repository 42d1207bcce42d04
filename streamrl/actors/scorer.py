"""A scorer replica of any kind (reward, reference): hosts the score loop of its stage."""

from collections.abc import Sequence

import ray

from streamrl.actors.engine_factory import HostedScorer
from streamrl.actors.wiring import ActorReport, Wiring
from streamrl.dataflow import Call
from streamrl.errors import ActorLostError
from streamrl.messages import Experience
from streamrl.pipeline import score
from streamrl.serving import Result


@ray.remote
class ScorerActor:
    """Long-lived: models and reward workers live as long as the run, or as the process does."""

    def __init__(self) -> None:
        self._scorer: HostedScorer | None = None

    async def start(self, wiring: Wiring, replica: int, call: Call) -> None:
        """Load what the stage scores with."""
        self._config = wiring.config.scorer
        self._call = call
        self._stage = wiring.stage(call.stage, f"{call.role}-{replica}")
        self._scorer = await wiring.engines.scorer(wiring.config, call.role)

    async def run(self) -> None:
        """The loop of the stage, until the actor is killed."""
        batch = self._config.max_groups
        columns = self._call.needs
        assert self._scorer is not None
        await score(self._stage, self._scorer, columns=columns, slots=2 * batch, batch=batch)

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
