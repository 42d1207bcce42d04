"""A scorer replica of any kind (reward, reference): hosts the score loop of its stage."""

from collections.abc import Sequence

import ray

from streamrl.actors.wiring import ActorReport, Wiring
from streamrl.dataflow import Call
from streamrl.errors import StreamError
from streamrl.messages import Columns, Experience
from streamrl.pipeline import score


@ray.remote
class ScorerActor:
    """Long-lived: models and reward workers live as long as the run."""

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
        await score(self._stage, self._scorer, columns=columns, slots=2 * batch, batch=batch)

    async def score(self, experiences: Sequence[Experience]) -> list[Columns | StreamError]:
        """Score groups that are not in the queue: those of an evaluation."""
        return await self._scorer.score(experiences)

    async def drain(self) -> ActorReport:
        """What this replica did since the last call, with a few scored texts."""
        spans = self._stage.spans
        return ActorReport(spans.process, spans.drain(), self._scorer.drain_samples())
