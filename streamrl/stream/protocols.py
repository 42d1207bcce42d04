"""Interfaces that the stream's loops call; each names the class that has it in a run.

Tests and the simulator have classes of their own.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamrl.buffer import ExperienceQueue, ShardStats
from streamrl.buffer.micro_batch_schedule import Round, ScheduledRound, UpdatePlan
from streamrl.buffer.run_log import LedgerCounts, TrainedGroup
from streamrl.messages import Columns, GroupInfo, Prompt
from streamrl.telemetry.spans import SpanArgValue, SpanRecorder

FinishedCallback = Callable[[], None]
"""Called on the event loop for each finished completion, before the whole group is finished."""
SampleFunction = Callable[[Prompt, Columns | None, FinishedCallback], Awaitable[Columns]]
"""Samples the columns of a prompt; weights may be updated in place meanwhile.

The second argument holds partial rollouts to resume from, or None.
"""
ReadPartialRollouts = Callable[[], Awaitable[Mapping[str, Columns]]]
"""Returns the partial rollouts of all running groups with at least one sampled token, by uid."""


class TrainerProtocol(Protocol):
    """A trained model, all its ranks behind one interface; a round has `dp_size` micro-batches.

    In a run: `TrainerGroup`.
    """

    dp_size: int
    update_plan: UpdatePlan

    def begin_step(self, version: int, adaptive_params: Mapping[str, float]) -> None:
        """Start the training step of `version`.

        adaptive_params: values, such as the KL coefficient, that override the settings of the same
        names during this step.
        """
        ...

    def is_frozen(self, version: int) -> bool:
        """Return True if the step of `version` does not train this model (critic warm-up)."""
        ...

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        """Compute what needs all groups of a step, such as step-wide advantages, before training.

        Called once the last group is known. uids: all groups of the step. rounds: those not yet
        trained.
        """
        ...

    async def train_round(self, micro_batches: Round, *, epoch: int) -> Mapping[str, float]:
        """Run forward and backward of one micro-batch per data-parallel rank; accumulate gradients.

        Returns metric sums of the micro-batches, which include the loss denominators.
        """
        ...

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Run the optimizer on the accumulated gradients; return metrics (gradient norm, ...).

        sums: metric sums of all micro-batches of the update, which include the loss denominators.
        """
        ...


class StepControl(Protocol):
    """Decides before each round and each update whether a training step goes on.

    In a run: `RunState`.
    """

    def should_abandon_step(self, *, needs_s: float = 0.0) -> bool:
        """Return True if the step must be abandoned. needs_s: estimated time to finish it, s."""
        ...

    async def begin_update(self, role: str, *, finishes_step: bool) -> bool:
        """Wait until the model of a role may change; return False if the step is abandoned.

        finishes_step: the update is the last of the step.
        """
        ...


class PromptSource(Protocol):
    """Prompts of the data set, in the order in which the run draws them.

    In a run: `PromptStream`.
    """

    async def prefetch_prompts(self, count: int) -> None:
        """Load the next `count` prompts ahead of time, so that drawing them does not block."""
        ...

    def draw_prompts(self, count: int) -> list[Prompt]: ...

    def get_prompt(self, uid: str) -> Prompt:
        """Return the prompt of a uid of any attempt, drawn by this run or before a resume."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...


class DeviceLease(Protocol):
    """Right of a process to compute on its devices; never blocks where no stages share them.

    `hold` returns a context in which a stage may compute. `report_progress` extends the deadlines
    of stages that wait for the same devices. In a run: `DedicatedDeviceLease`, and
    `SharedDeviceLease` where stages share devices.
    """

    def hold(self, stage: str) -> AbstractAsyncContextManager[None]: ...

    def report_progress(self) -> None: ...


@dataclass(frozen=True)
class TrainStepResult:
    """Metrics of one model in a training step: sums over micro-batches, and metrics per update."""

    metric_sums: Mapping[str, float]
    update_metrics: Sequence[Mapping[str, float]]


@dataclass
class FilterTally:
    """Totals of the groups filtered during a training step: number, tokens, sampled tokens.

    `oversample` is the oversampling factor at the end of the step. Groups dropped as stale count
    apart: their number, rollouts and sampled tokens, and the prompts with no attempt left.
    """

    num_groups: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    oversample: float = 1.0
    num_stale: int = 0
    num_stale_rollouts: int = 0
    num_stale_tokens: int = 0
    num_lost_prompts: int = 0

    def add_stale_group(self, info: GroupInfo | None, *, is_lost: bool) -> None:
        self.num_stale += 1
        self.num_lost_prompts += is_lost
        if info is not None:
            self.num_stale_rollouts += len(info.lengths)
            self.num_stale_tokens += info.num_loss_tokens

    def add_group(self, info: GroupInfo | None) -> None:
        self.num_groups += 1
        if info is not None:
            self.num_tokens += info.num_tokens
            self.num_sampled_tokens += info.num_loss_tokens


@dataclass(frozen=True)
class StepResult:
    """Result of the training step of `version`.

    `results_by_role` has the result of each trained model. `adaptive_params` are the values used.
    `ended_at` is a Unix time, s. `queue_stats` and `ledger_counts` are as of the end of the step,
    when the ledger was checked against the queue. `is_repeated`: the run log has the step, which a
    predecessor of this process trained after the last checkpoint.
    """

    version: int
    groups: Sequence[TrainedGroup]
    results_by_role: Mapping[str, TrainStepResult]
    adaptive_params: Mapping[str, float]
    queue_stats: ShardStats
    ledger_counts: LedgerCounts
    ended_at: float
    filter_tally: FilterTally = field(default_factory=FilterTally)
    is_repeated: bool = False


@dataclass(frozen=True)
class StageContext:
    """A stage's name, and its access to the queue, the devices and the trace.

    spans: of this process; a loop whose work the ranks of a model do, and record, has none.
    """

    name: str
    queue: ExperienceQueue
    device_lease: DeviceLease
    spans: SpanRecorder = field(default_factory=lambda: SpanRecorder(""))
    leave_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the stage must lease nothing more and leave the run."""

    @asynccontextmanager
    async def hold_devices(self, **facts: SpanArgValue) -> AsyncIterator[dict[str, SpanArgValue]]:
        """Hold the device lease and record the time as a busy span of the stage.

        Yields the span's `facts` as a dict, to which the caller may add.
        """
        async with self.device_lease.hold(self.name):
            with self.spans.record_span(self.name, **facts) as span_facts:
                yield span_facts
