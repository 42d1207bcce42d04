"""A scorer replica of any role (reward, cost, reference, value): hosts the loops of its stages."""

from collections.abc import Sequence

from streamrl.actors.actor_context import ActorReport, Wiring
from streamrl.actors.protocols import HostedScorer
from streamrl.actors.replica import Replica, same
from streamrl.dataflow import MOVED, REWARD, Call
from streamrl.errors import ActorLostError
from streamrl.messages import Experience
from streamrl.pipeline import Serving, score
from streamrl.stream.stage_worker import Result


class ScorerActor(Replica):
    """Long-lived: models and reward workers live as long as the run, or as the process does."""

    def __init__(self) -> None:
        self._scorer: HostedScorer | None = None

    async def start(self, wiring: Wiring, replica: int, calls: Sequence[Call]) -> None:
        """Load what the stages score with."""
        self._config = wiring.config
        self._calls = calls
        role, follows = calls[0].role, calls[0].follows
        due = self._config.reference.version_for if follows == MOVED else same
        self._take_place(wiring, calls, f"{role}-{replica}", follows=follows, due=due)
        self._scorer = await wiring.engines.scorer(wiring.config, wiring.max_length, role)

    async def run(self) -> None:
        """The loops of the stages, until the actor is killed or has left."""
        scorer, batch = self._scorer, self._config.scorer.max_groups
        assert scorer is not None
        loops = []
        for stage, call in zip(self._stages, self._calls, strict=True):
            serving = Serving(call.needs, 2 * batch, batch)
            loops.append(score(stage, scorer.stages[stage.name], serving, held=self._held))
        try:
            await self._serve(loops, scorer.follower)
        finally:
            await scorer.close()

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
        samples, counts = self._scorer.drain_samples(), self._scorer.drain_counts()
        return ActorReport(spans.process, spans.drain(), samples, counts)
