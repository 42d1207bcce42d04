"""What the loops call: engines, remote proxies and test fakes all have these faces."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.buffer import ExperienceQueue, ShardStats
from streamrl.buffer.books import TrainedGroup
from streamrl.buffer.ledger import LedgerCounts
from streamrl.engines.packing import Round
from streamrl.messages import Experience, Prompt, Rollout
from streamrl.serving import Result
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightManifest
from streamrl.weights.registry import Held


class Generator(Protocol):
    """Samples the rollouts of a prompt, and takes new weights while it does."""

    async def rollouts(self, prompt: Prompt) -> list[Rollout]: ...

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> None: ...


class Scorer(Protocol):
    """Adds columns to groups. A group that cannot be scored comes back as the error."""

    async def score(self, experiences: Sequence[Experience]) -> Sequence[Result]: ...


class Trainer(Protocol):
    """All ranks of the policy's trainer as one."""

    world_size: int

    async def train_round(self, work: Round) -> Mapping[str, float]:
        """Forward and backward of one micro-batch per rank; sums to be added over the step."""
        ...

    async def update(self, totals: "StepTotals", version: int) -> "Update":
        """Optimizer update from the gradients so far, published as `version`."""
        ...


class WeightChannel(Protocol):
    """The readers' end of weight sync."""

    async def newest(self, held: Held, *, wait_s: float) -> WeightManifest | None: ...

    async def fetch(self, manifest: WeightManifest) -> Mapping[str, Any]: ...


class PromptSource(Protocol):
    """Where prompts come from, without end."""

    def draw(self, count: int) -> list[Prompt]: ...

    def prompt(self, uid: str) -> Prompt:
        """The prompt of a uid that was drawn, now or before a resume."""
        ...

    def retry(self, uid: str) -> Prompt:
        """The prompt of a uid again, as its next attempt."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Where it stands, for a checkpoint."""
        ...


class DeviceLease(Protocol):
    """The right to compute on a pool. Free where every stage has a pool of its own."""

    def hold(self, stage: str) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True)
class StepTotals:
    """What the summed loss of a step is normalised by, over all micro-batches and ranks."""

    num_loss_tokens: int
    num_rollouts: int


@dataclass(frozen=True)
class Update:
    """What an optimizer update reports (gradient norm, ...) and the version it published."""

    metrics: Mapping[str, float]
    manifest: WeightManifest


@dataclass(frozen=True)
class StepOutcome:
    """A finished step of `version`; `sums` are those of its micro-batches. Times are epoch s.

    `queue` and `ledger` are as of its end, when the ledger was checked against the queue.
    """

    version: int
    totals: StepTotals
    groups: Sequence[TrainedGroup]
    sums: Mapping[str, float]
    update: Update
    queue: ShardStats
    ledger: LedgerCounts
    started_at: float
    ended_at: float


@dataclass(frozen=True)
class Stage:
    """A stage's place in the stream, given to its loop."""

    name: str
    queue: ExperienceQueue
    lease: DeviceLease
    spans: SpanRecorder

    @asynccontextmanager
    async def computing(self, **facts: float | str) -> AsyncIterator[None]:
        """Hold the pool and record a span: what a stage does inside counts as busy."""
        async with self.lease.hold(self.name):
            with self.spans.span(self.name, **facts):
                yield
