"""Ranks that score groups with a model: those of a scorer's replica, and those that train it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.liveness import PingableActor
from streamrl.actors.rank_calls import RankCalls, lead_scoring
from streamrl.actors.replica import ReplicaActor
from streamrl.actors.transport.ray_calls import find_rendezvous, set_rendezvous
from streamrl.dataflow import REWARD_CALL, SEQUENCE_COLUMNS, ModelCall
from streamrl.engines.trainer_config import LOAD_TIMEOUT_S
from streamrl.errors import ActorLostError, DeadlineError, StreamError
from streamrl.messages import Array, Columns, Experience, GroupLease
from streamrl.pipeline import score_groups
from streamrl.rewards.reward_scorer import RewardStages
from streamrl.run_dir.crash_stacks import record_crash_stacks
from streamrl.stream.protocols import StageContext
from streamrl.stream.stage_worker import ConcurrencyLimit, InFlightWork, StageResult
from streamrl.weights import WeightLoadStats

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.engines.training.model_rank import ModelRank

ModelCalls = Sequence[ModelCall]
T = TypeVar("T")
PeerOptions = Sequence[Mapping[str, Any]]
"""Ray options of the actors of ranks 1 and up."""
Rendezvous = tuple[str, int]
"""Host and port where the ranks of a model meet."""


class RankActor(PingableActor):
    """Base of the actors of a model's ranks, which score leased groups with the model.

    One thread runs the model; reads from the queue overlap with it.
    """

    _model: "ModelRank"

    def _join_ranks(
        self,
        context: ActorContext,
        calls: ModelCalls,
        name: str,
        rendezvous: Rendezvous,
    ) -> StageContext:
        """Set up what a rank needs before its model; return the stage of the first call."""
        record_crash_stacks(context.run_dir, name)
        self._config = context.config
        self._model_thread = ThreadPoolExecutor(1, "model")
        set_rendezvous(*rendezvous)
        stages = context.make_stages(calls, name)
        self._calls_by_stage = {
            call.stage: (call, stage) for call, stage in zip(calls, stages, strict=True)
        }
        return stages[0]

    async def score_groups(self, stage: str, leases: Sequence[GroupLease]) -> None:
        """Compute and commit the columns of these groups; skip those whose lease was lost.

        A collective if the model's forward pass is one; then all ranks must call.
        """
        call, context = self._calls_by_stage[stage]
        groups = await context.queue.read_leased(leases, SEQUENCE_COLUMNS)
        lengths = [length for columns in groups.values() for length in columns["lengths"].tolist()]
        facts = {"groups": len(groups), "rollouts": len(lengths), "tokens": sum(lengths)}
        async with self._run_compute_phase(is_piece=True):
            with context.spans.record_span(stage, **facts):
                scored = await self._run_in_thread(self._compute_columns, groups, call.produces)
        if scored and self._model.is_first_of_batch:
            await context.queue.commit_columns(scored)

    def _compute_columns(
        self, groups: Mapping[GroupLease, Columns], names: Sequence[str]
    ) -> list[tuple[GroupLease, Columns]]:
        leases = self._model.find_common(list(groups))
        scored = self._model.score_groups(
            [groups[lease] for lease in leases],
            names,
            micro_batch_tokens=self._config.pipeline.micro_batch_tokens,
        )
        return list(zip(leases, scored, strict=True))

    def _run_compute_phase(
        self, *, is_piece: bool = False, may_release_kv: bool = True
    ) -> AbstractAsyncContextManager[None]:
        """Context in which the rank may compute."""
        return nullcontext()

    async def _run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._model_thread, function, *arguments)


class ScoringRankActor(RankActor):
    """Actor of a rank of a model that only scores; a `LeadingRankActor` leads it."""

    _full: "Mapping[str, Tensor] | None" = None

    async def start_rank(
        self,
        context: ActorContext,
        calls: Sequence[ModelCall],
        rank: int,
        name: str,
        rendezvous: Rendezvous,
    ) -> None:
        """Load this rank's part of the model."""
        self._rank_spans = self._join_ranks(context, calls, name, rendezvous).spans
        self._model = await self._run_in_thread(
            context.engines.make_scoring_rank, context.config, context.max_length, rank, calls[0]
        )

    async def compute_logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Compute a reward model's logit of each row of token ids; all ranks must call."""
        return await self._run_in_thread(self._model.compute_logits, rows)

    async def copy_weights(self) -> None:
        """Take this rank's part of the version that rank 0 has; all ranks must call."""
        full, self._full = self._full, None
        await self._run_in_thread(self._model.copy_weights, full)

    async def drain_spans(self) -> ActorReport:
        return ActorReport(self._rank_spans.process, self._rank_spans.drain_spans())


class LeadingRankActor(ScoringRankActor, ReplicaActor):
    """Base class of actors that lead the ranks of a copy of a model.

    The leader is rank 0 itself and owns the other ranks' actors: they end with this process, which
    ends if one of them is lost, so that a restart begins with all ranks.
    """

    _ranks: RankCalls | None = None
    """All ranks, once they have started."""

    async def _start_ranks(
        self, context: ActorContext, calls: ModelCalls, peers: PeerOptions
    ) -> None:
        """Start all ranks."""
        others = [ray.remote(ScoringRankActor).options(**options).remote() for options in peers]
        names = [self._name, *(f"{self._name}/{rank}" for rank in range(1, len(peers) + 1))]
        actors = [ray.get_runtime_context().current_actor, *others]
        ranks_config = context.config.get_ranks_config(calls[0])
        model_bytes, has_peers = context.model_bytes[calls[0].role], bool(peers)
        ranks = RankCalls(
            names, actors, ranks_config, model_bytes=model_bytes, is_collective=has_peers
        )
        rendezvous = find_rendezvous()
        starts = [(context, calls, rank, name, rendezvous) for rank, name in enumerate(names)]
        await ranks.call_each_rank("start_rank", starts, LOAD_TIMEOUT_S)
        self._ranks = ranks

    @property
    def _started_ranks(self) -> RankCalls:
        assert self._ranks is not None, "start has not returned"
        return self._ranks

    async def _finish_on_ranks(self, call: Awaitable[T]) -> T:
        """Return the result of a call of all ranks; if it fails, end this process and so all ranks.

        After an error of any kind other ranks may still wait for the failed one in a collective.
        Errors of a rank that is alone are raised, but for a deadline: it may be hung.
        """
        try:
            return await call
        except StreamError as error:
            if len(self._started_ranks.dp_ranks) > 1 or isinstance(error, DeadlineError):
                await self.crash_process(f"its ranks are lost: {error}")
            raise


class ModelScorerActor(LeadingRankActor):
    """Actor that leases groups and has the ranks of a copy of a model score them."""

    async def start(
        self, context: ActorContext, replica: int, calls: ModelCalls, peers: PeerOptions = ()
    ) -> None:
        """Start all ranks."""
        self._config = context.config
        name, follows = f"{calls[0].role}-{replica}", calls[0].followed_role
        self._join_stream(context, calls, name, follows=follows)
        await self._start_ranks(context, calls, peers)

    async def run(self) -> None:
        """Lease groups and have them scored until the run ends or a drain begins."""
        dp_size, served = self._started_ranks.dp_size, self._served_version
        loops = [
            lead_scoring(stage, self._score_on_ranks, dp_size, served=served)
            for stage in self._stages
        ]
        await self._run_loops(loops, self)

    async def _score_on_ranks(self, stage: str, experiences: Sequence[Experience]) -> None:
        await self._finish_on_ranks(self._started_ranks.score_groups(stage, experiences))

    async def load_weights(self, tensors: "Mapping[str, Tensor]", version: int) -> WeightLoadStats:
        """Copy a version into the ranks; a `FollowerProtocol`."""
        self._full = await asyncio.to_thread(self._model.build_full, tensors)
        ranks = self._started_ranks
        async with ranks.exclude_others():
            started = time.perf_counter()
            await self._finish_on_ranks(ranks.call_ranks("copy_weights"))
            return WeightLoadStats(pause_s=time.perf_counter() - started)

    async def compute_logprobs(self, sequences: Sequence[Array]) -> None:
        """Return None: a scorer does not sample, so the logprob check does not apply."""

    async def collect_report(self) -> ActorReport:
        if self._ranks is None:
            return ActorReport("", ())
        reports = await self._ranks.call_ranks("drain_spans")
        return replace(reports[0], spans=[span for report in reports for span in report.spans])


class RewardActor(LeadingRankActor):
    """Actor that hosts the rewards or the costs and runs the loops of their stages.

    It leads the ranks of a reward model that is split; another model is whole in its process.
    """

    def __init__(self) -> None:
        self._scorer: RewardStages | None = None

    async def start(
        self, context: ActorContext, replica: int, calls: ModelCalls, peers: PeerOptions = ()
    ) -> None:
        """Start the rewards, and the ranks of a split model before."""
        self._config, self._calls, role = context.config, calls, calls[0].role
        self._join_stream(context, calls, f"{role}-{replica}", follows=None)
        if peers:
            await self._start_ranks(context, calls, peers)
        on_ranks = self._compute_on_ranks if peers else None
        self._scorer = await context.engines.make_reward_scorer(context.config, role, on_ranks)

    async def _compute_on_ranks(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each row of token ids."""
        # The deadline of a reward ends its wait only: a pass ends on all ranks, or they end.
        self._pass = asyncio.ensure_future(self._run_pass(rows))
        return await asyncio.shield(self._pass)

    async def _run_pass(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Deal the rows to the data-parallel ranks in turn; return their logits in order."""
        ranks = self._started_ranks
        shares = [(rows[dp_rank :: ranks.dp_size],) for dp_rank in ranks.dp_ranks]
        async with ranks.exclude_others():
            replies = await self._finish_on_ranks(ranks.call_each_rank("compute_logits", shares))
        logits = [0.0] * len(rows)
        for dp_rank, reply in zip(ranks.dp_ranks, replies, strict=True):
            logits[dp_rank :: ranks.dp_size] = reply
        return logits

    async def run(self) -> None:
        """Lease groups, score them and commit the results until the run ends or a drain begins."""
        scorer, batch = self._scorer, self._config.scorer.max_groups
        assert scorer is not None
        loops = []
        for stage, call in zip(self._stages, self._calls, strict=True):
            score, limit = scorer.functions[stage.name], ConcurrencyLimit(2 * batch)
            loops.append(score_groups(stage, score, call.needs, InFlightWork(limit), batch))
        try:
            await self._run_loops(loops, None)
        finally:
            await scorer.rewards.close()

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        """Score the rewards of an evaluation, whose groups are not in the queue."""
        if self._scorer is None:
            raise ActorLostError("this scorer died and has not restarted yet")
        return await self._scorer.functions[REWARD_CALL.stage](experiences)

    async def collect_report(self) -> ActorReport:
        if self._scorer is None:
            return ActorReport("", ())
        spans = self._stages[0].spans
        recorded, counts = self._scorer.drain_recorded(), self._scorer.rewards.drain_counts()
        return ActorReport(spans.process, spans.drain_spans(), recorded, counts=counts)
