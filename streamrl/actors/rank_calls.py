"""Calls of all ranks of a model, in the same order on every rank."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from operator import add, sub
from typing import Any

from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, call_actor, gather_replies
from streamrl.config.run_config import RunConfig
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.messages import Experience, GroupLease
from streamrl.pipeline import score_groups
from streamrl.stream.protocols import StageContext
from streamrl.stream.stage_worker import COMMITTED, ConcurrencyLimit, InFlightWork, StageResult
from streamrl.weights import ServedVersion
from streamrl.weights.transport import estimate_model_send_s

GROUPS_PER_RANK = 8
"""Most groups of a rank in a call: about a micro-batch where each has one rollout, as in PPO."""
MAX_CALLS = 2
TRANSFERS = ("publish_weights", "publish_reference", "copy_weights")
"""Methods of ranks that send or receive all parameters, so that they may take longer."""
RankScore = Callable[[str, Sequence[Experience]], Awaitable[None]]
"""Has the ranks of a model score groups of a stage and commit the columns."""


def get_call_timeout_s(config: TrainerConfig, *, transferred: int = 0) -> float:
    """Return the deadline of a call of a model's ranks, which may wait for each other.

    transferred: size of the weight files, if the call sends or receives all parameters.
    """
    return config.collective_timeout_s + CALL_TIMEOUT_S + estimate_model_send_s(transferred)


def get_publish_timeout_s(config: RunConfig, model_bytes: Mapping[str, int]) -> float:
    """Return the deadline of publishing all models of a run. model_bytes: weight files by role."""
    return max(
        get_call_timeout_s(config.get_trainer_config(role), transferred=model_bytes[role])
        for role in config.dataflow.trained_roles
    )


class RankCalls:
    """The ranks of a model; each call reaches every rank.

    is_collective: whether calls of the ranks contain collectives. Two that started concurrently
    could start in different orders on two ranks and deadlock, so `exclude_others` keeps them apart.
    holds_version: cleared while the ranks' model is between two versions and must not score.
    """

    def __init__(
        self,
        names: Sequence[str],
        actors: Sequence[Any],
        config: TrainerConfig,
        *,
        model_bytes: int,
        is_collective: bool,
    ) -> None:
        """Create the calls of ranks with these names. model_bytes: size of the weight files."""
        self.dp_size = config.dp_size
        self._loads = [0] * self.dp_size
        self.dp_ranks = [config.get_dp_rank(rank) for rank in range(len(actors))]
        self._names, self._actors = names, actors
        self._config, self._model_bytes = config, model_bytes
        self._lock = asyncio.Lock()
        self._is_collective = is_collective
        self.holds_version = asyncio.Event()
        self.holds_version.set()

    def exclude_others(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the context in which calls with collectives must be made."""
        return self._lock if self._is_collective else contextlib.nullcontext()

    async def call_ranks(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every rank with the same arguments; return the replies by rank."""
        return await self.call_each_rank(method, [arguments] * len(self._actors), timeout_s)

    async def call_each_rank(
        self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every rank with its own arguments; return the replies by rank."""
        transferred = self._model_bytes if method in TRANSFERS else 0
        timeout_s = timeout_s or get_call_timeout_s(self._config, transferred=transferred)
        calls = (
            call_actor(actor, name, method, *values, timeout_s=timeout_s)
            for actor, name, values in zip(self._actors, self._names, arguments, strict=True)
        )
        return await gather_replies(*calls)

    async def score_groups(self, stage: str, experiences: Sequence[Experience]) -> None:
        """Have the ranks score leased groups and commit their columns.

        Tensors stay on the ranks: these read the groups from the queue. The deadlines of the calls
        between a step's updates bound the wait for a version, and for other calls.
        """
        shares, added = share_leases(experiences, self._loads)
        arguments = [(stage, shares[dp_rank]) for dp_rank in self.dp_ranks]
        # Groups that finish one by one come in calls of their own.
        self._loads = [*map(add, self._loads, added)]
        try:
            while True:
                await self.holds_version.wait()
                async with self.exclude_others():
                    if self.holds_version.is_set():
                        call = asyncio.create_task(self.call_each_rank("score_groups", arguments))
                        try:
                            await asyncio.shield(call)
                            return
                        finally:
                            # Ranks finish a call whose leader was cancelled; the next must not
                            # begin on some of them before.
                            await asyncio.wait({call})
        finally:
            self._loads = [*map(sub, self._loads, added)]


def share_leases(
    experiences: Sequence[Experience], loads: Sequence[int]
) -> tuple[list[list[GroupLease]], list[int]]:
    """Return the groups that each data-parallel rank scores, whole, and their tokens.

    loads: tokens that each rank has to score already. The sums are about equal.
    """
    shares: list[list[GroupLease]] = [[] for _ in loads]
    added = [0] * len(loads)
    sizes = [(e.info.num_tokens if e.info else 1, e.lease) for e in experiences]
    for tokens, lease in sorted(sizes, key=lambda size: -size[0]):
        lightest = min(range(len(loads)), key=lambda rank: loads[rank] + added[rank])
        shares[lightest].append(lease)
        added[lightest] += tokens
    return shares, added


def lead_scoring(
    stage: StageContext,
    score: RankScore,
    dp_size: int,
    *,
    served: ServedVersion | None = None,
) -> Coroutine[Any, Any, None]:
    """Return the loop that leases groups of a stage and has the ranks of its model score them.

    Two calls at a time keep `dp_size` data-parallel ranks busy, and groups that become ready
    meanwhile share a call, so that they can share forward passes. The loop reads no columns: the
    ranks do, and record the spans of the stage. score: called with the stage's name and groups.
    """

    async def compute(experiences: Sequence[Experience]) -> Sequence[StageResult]:
        await score(stage.name, experiences)
        return [COMMITTED] * len(experiences)

    batch = GROUPS_PER_RANK * dp_size
    in_flight = InFlightWork(ConcurrencyLimit(MAX_CALLS * batch), MAX_CALLS)
    return score_groups(stage, compute, (), in_flight, batch, served=served)
