"""What the loops call: engines, remote proxies and test fakes all have these faces."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.buffer import ExperienceQueue, ShardStats
from streamrl.buffer.assembly.micro_batch_schedule import ScheduledRound, UpdatePlan
from streamrl.buffer.assembly.packing import Round
from streamrl.buffer.books.ledger import LedgerCounts
from streamrl.buffer.books.run_log import TrainedGroup
from streamrl.messages import Array, Columns, GroupInfo, Prompt
from streamrl.telemetry.spans import SpanArgValue, SpanRecorder
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.version_registry import ReaderState


class FollowerProtocol(Protocol):
    """Holds a model that another trains."""

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        """Go over to another version. Raises WeightsError if it cannot, and keeps the old one."""
        ...

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        """The logprob of each token, float32 [T], of sequences, int32 [T]; 0 for the first.

        None if the model has no say in that.
        """
        ...


FinishedCallback = Callable[[], None]
"""Called for each completion that is finished, on the event loop, before all of them are."""
SampleFunction = Callable[[Prompt, Columns | None, FinishedCallback], Awaitable[Columns]]
"""What a generate stage makes of a prompt: its columns. New weights may come while it does.

It goes on from what another has begun of them, if that is given: columns of partial rollouts.
"""
ReadPartialRollouts = Callable[[], Awaitable[Mapping[str, Columns]]]
"""What has been begun: by uid, the groups under way of which a completion token exists."""


class TrainerProtocol(Protocol):
    """All ranks that train one model as one; a round has `dp_size` micro-batches."""

    dp_size: int
    update_plan: UpdatePlan

    def begin_step(self, version: int, dials: Mapping[str, float]) -> None:
        """Train the step of this version, with these in the place of settings of their names."""
        ...

    def is_frozen(self, version: int) -> bool:
        """Whether it leaves the step of this version out."""
        ...

    async def plan_step(self, uids: Sequence[str], turns: Sequence[ScheduledRound]) -> None:
        """Told the groups of a step, all of them, and the turns to come, before they are made."""
        ...

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """Forward and backward of one micro-batch per share; sums to be added over the update."""
        ...

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Optimizer update from the gradients so far, and what it reports (gradient norm, ...).

        `sums` are those of all its micro-batches: they say what it is normalised by.
        """
        ...

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Publish the model as it is to those who follow it now, `readers`, and to others later.

        It may train on meanwhile, but not update.
        """
        ...


@dataclass(frozen=True)
class FetchedWeights:
    """The tensors of a version, what came over for them, and why they took a detour if they did.

    copied_bytes: that were copied on their way without leaving a process; NaN if nobody knows.
    """

    tensors: Mapping[str, Any]
    num_bytes: int = 0
    fallback_reason: str = ""
    copied_bytes: float = math.nan


class WeightChannel(Protocol):
    """The readers' end of weight sync."""

    async def wait_for_newer(
        self, held: ReaderState, *, wait_s: float
    ) -> WeightManifest | None: ...

    async def fetch_weights(self, manifest: WeightManifest) -> "FetchedWeights":
        """Its tensors, verified. Raises WeightsError if they cannot be had, or are not whole."""
        ...


class ClosableWeightChannel(WeightChannel, Protocol):
    """A channel that may be left."""

    async def close(self) -> None: ...


class PromptSource(Protocol):
    """Where prompts come from, without end."""

    async def prefetch_prompts(self, count: int) -> None:
        """Have the next `count` at hand, so that drawing them takes no time."""
        ...

    def draw_prompts(self, count: int) -> list[Prompt]: ...

    def get_prompt(self, uid: str) -> Prompt:
        """The prompt of a uid that was drawn, now or before a resume."""
        ...

    def retry_prompt(self, uid: str) -> Prompt:
        """The prompt of a uid again, as its next attempt."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Where it stands, for a checkpoint."""
        ...


class DeviceLease(Protocol):
    """The right to compute on a pool. Free where every stage has a pool of its own."""

    def hold(self, stage: str) -> AbstractAsyncContextManager[None]: ...

    def report_progress(self) -> None:
        """A part of what it is held for is done."""
        ...


@dataclass(frozen=True)
class TrainStepResult:
    """What a trainer made of a step: the sums of its micro-batches, and what its updates report."""

    metric_sums: Mapping[str, float]
    update_metrics: Sequence[Mapping[str, float]]


@dataclass
class FilterTally:
    """What a filter took out within a step: groups, their tokens, and how many were sampled.

    `oversample` is how many prompts were admitted for each place at its end.
    """

    num_groups: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    oversample: float = 1.0

    def add_group(self, info: GroupInfo | None) -> None:
        """One more group, with what is known of it."""
        self.num_groups += 1
        if info is not None:
            self.num_tokens += info.num_tokens
            self.num_sampled_tokens += info.num_loss_tokens


@dataclass(frozen=True)
class StepResult:
    """A finished step of `version`; `made` is by the role that was trained, under `dials`.

    Times are epoch s.

    `queue` and `ledger` are as of its end, when the ledger was checked against the queue.
    """

    version: int
    groups: Sequence[TrainedGroup]
    results_by_role: Mapping[str, TrainStepResult]
    adaptive_params: Mapping[str, float]
    queue_stats: ShardStats
    ledger_counts: LedgerCounts
    started_at: float
    ended_at: float
    filter_tally: FilterTally = field(default_factory=FilterTally)


@dataclass(frozen=True)
class StageContext:
    """A stage's place in the stream, given to its loop."""

    name: str
    queue: ExperienceQueue
    device_lease: DeviceLease
    spans: SpanRecorder
    leave_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the stage is to take nothing more and to leave the run."""

    @asynccontextmanager
    async def record_compute(self, **facts: SpanArgValue) -> AsyncIterator[dict[str, SpanArgValue]]:
        """Hold the pool and record a span: what a stage does inside counts as busy.

        Gives the span's facts, for more to be added.
        """
        async with self.device_lease.hold(self.name):
            with self.spans.record_span(self.name, **facts) as known:
                yield known
