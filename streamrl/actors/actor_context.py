"""What connects an actor to the run: config, queue, weight channel, device lease, engines."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.actors.protocols import EngineFactory
from streamrl.actors.transport.ray_calls import await_reply
from streamrl.actors.transport.shard_proxy import RemoteShard
from streamrl.actors.transport.transport_spec import TransportSpec
from streamrl.buffer import ExperienceQueue
from streamrl.config import RunConfig
from streamrl.config.role_counts import assign_slots
from streamrl.dataflow import COST_CALL, REWARD_CALL, CallKind, Dataflow, ModelCall
from streamrl.placement import WorkerMemory
from streamrl.rewards import may_use_devices
from streamrl.stream.device_lease import (
    ArbiterProtocol,
    DedicatedDeviceLease,
    DeviceArbiter,
    ProgressClock,
    SharedDeviceLease,
    SuspendableWork,
)
from streamrl.stream.protocols import DeviceLease, StageContext
from streamrl.telemetry.cpu_usage import read_process_time
from streamrl.telemetry.spans import Span, SpanRecorder

if TYPE_CHECKING:
    from streamrl.actors.weight_channel import RemoteWeightChannel

MAX_LEASE_WAIT_S = 86400.0
"""Nobody has a pool for longer, s."""
RENEW_EVERY_S = 1.0
"""How often a stage hears what of its work is in vain, where there is more than enough of it, s."""
TRAINER_PHASE = "trainer"
"""Who holds a slot for all trainers of a run: they work as one."""


@dataclass(frozen=True)
class ActorContext:
    """Given to every actor of a run at its start.

    components: columns that the scores, and the costs, are combined from.
    max_length: most tokens of prompt and completion together.
    run_dir: where checkpoints go, absolute. memory: what hybrid workers hold, and give up.
    """

    config: RunConfig
    dataflow: Dataflow
    components: tuple[str, ...]
    max_length: int
    run_dir: Path
    shards: tuple[RemoteShard, ...]
    coordinator: Any
    engines: EngineFactory
    transport: TransportSpec
    memory: WorkerMemory | None = None

    def make_channel(self, reader: str, role: str) -> "RemoteWeightChannel":
        """Where `reader` follows the weights of a role."""
        # Those who follow have a model, and torch; every actor of a run is wired.
        from streamrl.actors.weight_channel import RemoteWeightChannel

        return RemoteWeightChannel(self.coordinator, self.transport, reader, role)

    @property
    def train_columns(self) -> tuple[str, ...]:
        """What a rank reads of a group: what the algorithm needs, and the components of rewards."""
        train = self.dataflow.select_calls(CallKind.TRAIN)[0]
        return (*train.needs, *self.components)

    def make_stages(
        self,
        calls: Sequence[ModelCall],
        process: str,
        *,
        suspendable: SuspendableWork | None = None,
    ) -> list[StageContext]:
        """The places of an actor called `process`, one per call of its role, under one lease.

        They leave together. Where the pool is shared, what is `suspendable` gives way to others.
        """
        lease = self._make_lease(calls[0].role, process, suspendable)
        spans = SpanRecorder(process)
        leaving = asyncio.Event()
        # What is left over of a step need not be made to its end.
        hears_s = math.inf if self.config.filter.oversample_factor == 1 else RENEW_EVERY_S
        queues = [
            ExperienceQueue(self.shards, process, max_renew_interval_s=hears_s) for _ in calls
        ]
        return [
            StageContext(call.stage, queue, lease, spans, leaving)
            for call, queue in zip(calls, queues, strict=True)
        ]

    def _make_lease(
        self, role: str, process: str, suspendable: SuspendableWork | None
    ) -> DeviceLease:
        arbiter = RemoteArbiter(self.coordinator)
        return make_lease(self.config, arbiter, process, role, suspendable=suspendable)


@dataclass(frozen=True)
class ActorReport:
    """What an actor did since its last report; `peaks_mb` is its memory by phase.

    process_time: processor seconds of its process so far; actors may share one.
    """

    process: str
    spans: Sequence[Span]
    samples: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    counts: Mapping[str, float] = field(default_factory=dict)
    peaks_mb: Mapping[str, float] = field(default_factory=dict)
    process_time: Mapping[str, float] = field(default_factory=read_process_time)


def map_phase_slots(config: RunConfig) -> dict[str, set[int]]:
    """What slots are held for, and which: each role that serves, and all trainers, who are one.

    Rules compute nothing on a slot's devices, so nobody waits for them, nor they for anybody.
    """
    trained = config.dataflow.trained_roles
    judges = {REWARD_CALL.role: config.rewards, COST_CALL.role: config.costs}
    found: dict[str, set[int]] = {}
    for role, slots in assign_slots(config).slots.items():
        if role not in judges or may_use_devices(judges[role]):
            found.setdefault(TRAINER_PHASE if role in trained else role, set()).update(slots)
    return found


def make_arbiter(config: RunConfig, pulse: ProgressClock) -> DeviceArbiter:
    """What lends a run's slots, where its stages share some."""
    timeout_s = config.pipeline.stall_s
    if config.placement.is_sequential:
        return DeviceArbiter(timeout_s=timeout_s, progress_clock=pulse)
    # On policy there is nothing else to do before all rollouts of the step are there.
    slice_s = config.placement.slice_s if config.pipeline.max_staleness else math.inf
    return DeviceArbiter(
        timeout_s=timeout_s, slice_s=slice_s, slots=map_phase_slots(config), progress_clock=pulse
    )


def make_lease(
    config: RunConfig,
    arbiter: ArbiterProtocol,
    holder: str,
    role: str,
    *,
    suspendable: SuspendableWork | None = None,
) -> DeviceLease:
    """The lease of an actor of a role, or of all TRAINERS: free where nobody else has its slots."""
    if config.placement.is_sequential:
        return SharedDeviceLease(arbiter, holder)
    held = map_phase_slots(config)
    phase = TRAINER_PHASE if role in config.dataflow.trained_roles else role
    mine = held.pop(phase, set[int]())
    if not any(mine & theirs for theirs in held.values()):
        return DedicatedDeviceLease()
    return SharedDeviceLease(arbiter, holder, phase, suspendable=suspendable)


class RemoteArbiter:
    """The coordinator's device lease, from another process."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    async def acquire(self, holder: str, phase: str) -> None:
        """Wait for the pool; it is the arbiter that says when that is too long."""
        reply = self._coordinator.call_arbiter.remote("acquire", holder, phase)
        await await_reply(reply, "lease.acquire", MAX_LEASE_WAIT_S)

    def report_progress(self, holder: str) -> None:
        """Say so; nobody waits for an answer."""
        self._coordinator.call_arbiter.remote("report_progress", holder)

    async def release(self, holder: str) -> None:
        """Give the pool back."""
        await await_reply(self._coordinator.call_arbiter.remote("release", holder), "lease.release")

    async def wait_for_preemption(self, holder: str) -> bool:
        """Wait, for a while, until the pool should be given back."""
        return bool(
            await await_reply(
                self._coordinator.call_arbiter.remote("wait_for_preemption", holder), "lease.wanted"
            )
        )
