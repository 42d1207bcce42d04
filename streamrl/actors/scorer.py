"""Scorer replica: an actor that scores groups in one role (reward, cost, reference, value)."""

from collections.abc import Sequence

from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.engine_factory import HostedScorer
from streamrl.actors.replica import ReplicaActor, find_policy_version
from streamrl.dataflow import EMA_REFERENCE, REWARD_CALL, ModelCall
from streamrl.errors import ActorLostError
from streamrl.messages import Experience
from streamrl.pipeline import ScoringLimits, score_groups
from streamrl.stream.stage_worker import StageResult


class ScorerActor(ReplicaActor):
    """Actor that hosts a role's models or reward workers and runs the loops of its stages."""

    def __init__(self) -> None:
        self._scorer: HostedScorer | None = None

    async def start(self, context: ActorContext, replica: int, calls: Sequence[ModelCall]) -> None:
        self._config = context.config
        self._calls = calls
        role, follows = calls[0].role, calls[0].followed_role
        due = (
            self._config.reference.find_reference_version
            if follows == EMA_REFERENCE
            else find_policy_version
        )
        self._join_stream(context, calls, f"{role}-{replica}", follows=follows, due=due)
        self._scorer = await context.engines.make_scorer(context.config, context.max_length, role)

    async def run(self) -> None:
        """Lease groups, score them and commit the results until the run ends or a drain begins."""
        scorer, batch = self._scorer, self._config.scorer.max_groups
        assert scorer is not None
        loops = []
        for stage, call in zip(self._stages, self._calls, strict=True):
            limits = ScoringLimits(call.needs, 2 * batch, batch)
            loops.append(
                score_groups(stage, scorer.stages[stage.name], limits, served=self._served_version)
            )
        try:
            await self._run_loops(loops, scorer.follower)
        finally:
            await scorer.close()

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Score the rewards of an evaluation, whose groups are not in the queue."""
        if self._scorer is None:
            raise ActorLostError("this scorer died and has not restarted yet")
        return await self._scorer.stages[REWARD_CALL.stage](experiences)

    async def collect_report(self) -> ActorReport:
        if self._scorer is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        recorded, counts = self._scorer.drain_recorded(), self._scorer.drain_counts()
        return ActorReport(spans.process, spans.drain_spans(), recorded, counts=counts)
