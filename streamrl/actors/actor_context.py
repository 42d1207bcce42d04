"""Context of an actor: everything that an actor process needs to take part in a run.

From the context an actor makes its queue clients, device lease and engines.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.queue_shard import RemoteShard
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, await_reply
from streamrl.buffer import ExperienceQueue
from streamrl.config.role_counts import assign_slots
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import REWARD_ROLES, CallKind, ModelCall
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.rewards.registry import may_use_devices
from streamrl.stream.device_lease import (
    ArbiterProtocol,
    DedicatedDeviceLease,
    DeviceArbiter,
    ProgressClock,
    SharedDeviceLease,
    SuspendableWork,
)
from streamrl.stream.protocols import DeviceLease, StageContext
from streamrl.telemetry.rollout_log import RecordedGroup
from streamrl.telemetry.spans import Span, SpanRecorder
from streamrl.weights.transport import TransportSpec

MAX_LEASE_WAIT_S = 86400.0
"""Limit of a call that waits for a device lease; the arbiter enforces a shorter deadline."""
RENEW_EVERY_S = 1.0
"""Interval of lease renewals with oversampling, by which stages stop work on dropped groups."""
TRAINER_PHASE = "trainer"
"""All trainers of a run share one phase: they compute in lockstep."""


@dataclass(frozen=True)
class ActorContext:
    """Arguments that every actor of a run receives at its start. Picklable.

    max_length: maximum tokens of prompt and completion together.
    model_bytes: size of the weight files of each role's models.
    run_dir: run directory, absolute.
    shards, coordinator: handles of those actors.
    memory: memory budget of a hybrid worker; None without hybrid workers.
    """

    config: RunConfig
    max_length: int
    model_bytes: Mapping[str, int]
    run_dir: Path
    shards: tuple[RemoteShard, ...]
    coordinator: Any
    engines: RealEngineFactory
    transport: TransportSpec
    memory: WorkerMemory | None = None

    @property
    def train_columns(self) -> tuple[str, ...]:
        """Queue columns that a trainer rank reads: the algorithm's, and parts of the scores."""
        train = self.config.dataflow.select_calls(CallKind.TRAIN)[0]
        return (*train.needs, *self.config.score_part_columns)

    def make_stages(
        self,
        calls: Sequence[ModelCall],
        process: str,
        *,
        suspendable: SuspendableWork | None = None,
    ) -> list[StageContext]:
        """Return a StageContext for each model call that the actor `process` serves.

        All of them share one device lease and one event that requests the actor to leave the run.
        suspendable: work that the actor suspends when another phase needs the shared pool.
        """
        arbiter, role = RemoteArbiter(self.coordinator), calls[0].role
        lease = make_lease(self.config, arbiter, process, role, suspendable=suspendable)
        spans = SpanRecorder(process)
        leave_requested = asyncio.Event()
        # Oversampling leaves surplus groups at the end of a step; stages may abandon them early.
        hears_s = math.inf if self.config.filter.oversample_factor == 1 else RENEW_EVERY_S
        queues = [
            ExperienceQueue(self.shards, process, max_renew_interval_s=hears_s) for _ in calls
        ]
        return [
            StageContext(call.stage, queue, lease, spans, leave_requested)
            for call, queue in zip(calls, queues, strict=True)
        ]


@dataclass(frozen=True)
class ActorReport:
    """Activity of an actor since its last report: spans, rollouts, counts, memory.

    recorded: scored groups for `rollouts/`.
    advantages: of trained rollouts, by uid and row in the group: mean over the trained tokens.
    counts: numbers that are summed over the actors for the metrics of a step.
    peaks_mb: memory peak by phase, MiB.
    """

    process: str
    spans: Sequence[Span]
    recorded: Sequence[RecordedGroup] = field(default_factory=tuple)
    advantages: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    peaks_mb: Mapping[str, float] = field(default_factory=dict)


def map_phase_slots(config: RunConfig) -> dict[str, set[int]]:
    """Return the device slots that each phase uses, by phase name.

    Each serving role is a phase; all trained roles form one phase. Rule-based rewards use no
    device, so their roles have no phase and never wait for a device lease.
    """
    trained = config.dataflow.trained_roles
    phase_slots: dict[str, set[int]] = {}
    for role, slots in assign_slots(config).slots.items():
        if role not in REWARD_ROLES or may_use_devices(config.get_rewards(role)):
            phase_slots.setdefault(TRAINER_PHASE if role in trained else role, set()).update(slots)
    return phase_slots


def make_arbiter(config: RunConfig, clock: ProgressClock) -> DeviceArbiter:
    """Make the arbiter that grants device leases to the phases of a run, on its coordinator."""
    timeout_s = config.pipeline.stall_s
    if config.placement.is_sequential:
        return DeviceArbiter(timeout_s=timeout_s, progress_clock=clock)
    # On-policy, training cannot start before all rollouts of the step exist: no time slices.
    slice_s = config.placement.slice_s if config.pipeline.max_staleness else math.inf
    return DeviceArbiter(
        timeout_s=timeout_s, slice_s=slice_s, slots=map_phase_slots(config), progress_clock=clock
    )


def make_lease(
    config: RunConfig,
    arbiter: ArbiterProtocol,
    holder: str,
    role: str,
    *,
    suspendable: SuspendableWork | None = None,
) -> DeviceLease:
    """Return the device lease of the process `holder`, which serves `role`.

    Each role is a phase, and all trained roles are one phase (TRAINER_PHASE). The lease never waits
    (DedicatedDeviceLease) if no other phase uses the role's slots, unless placement is sequential.
    suspendable: work that the actor suspends when another phase needs the slots.
    """
    if config.placement.is_sequential:
        return SharedDeviceLease(arbiter, holder)
    if not shares_slots(config, role):
        return DedicatedDeviceLease()
    phase = TRAINER_PHASE if role in config.dataflow.trained_roles else role
    return SharedDeviceLease(arbiter, holder, phase, suspendable=suspendable)


def shares_slots(config: RunConfig, role: str) -> bool:
    """Return whether the work of a role must wait for another phase.

    That is if the other uses its slots, or if placement is sequential. TRAINER_PHASE means all
    trained roles.
    """
    others = map_phase_slots(config)
    phase = TRAINER_PHASE if role in config.dataflow.trained_roles else role
    own_slots = others.pop(phase, set[int]())
    own_slots &= set(assign_slots(config).slots.get(role, own_slots))
    return config.placement.is_sequential or any(own_slots & slots for slots in others.values())


class RemoteArbiter:
    """Client of the coordinator's device arbiter, used by device leases in other processes."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    async def acquire(self, holder: str, phase: str) -> None:
        """Wait until `holder` may compute on the shared device pool in this phase.

        The arbiter, not this call, limits the wait: its error is raised here.
        """
        await self._call("acquire", holder, phase, timeout_s=MAX_LEASE_WAIT_S)

    def report_progress(self, holder: str) -> None:
        self._coordinator.call_arbiter.remote("report_progress", holder)

    async def release(self, holder: str) -> None:
        await self._call("release", holder)

    async def wait_for_preemption(self, holder: str) -> bool:
        """Wait up to PREEMPTION_WAIT_S for a request to free the pool; return whether one came."""
        return bool(await self._call("wait_for_preemption", holder))

    async def _call(self, method: str, *arguments: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        reply = self._coordinator.call_arbiter.remote(method, *arguments)
        return await await_reply(reply, f"lease.{method}", timeout_s)
