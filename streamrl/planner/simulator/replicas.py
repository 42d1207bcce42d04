"""Simulated generators, scorers and trainers, and what they share: leases, versions, spans."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from streamrl.buffer.micro_batch_schedule import Round, ScheduledRound, UpdatePlan
from streamrl.dataflow import EMA_REFERENCE, GREEDY_CALL, Dataflow, ModelCall
from streamrl.engines.trainer_config import ReferenceConfig
from streamrl.messages import GroupInfo
from streamrl.placement.placements import Placement
from streamrl.planner.problem.stage_timings import StageTimings, TrainTiming, WeightsTiming
from streamrl.planner.simulator.simulated_engine import RunningGroup, SimulatedEngine
from streamrl.planner.simulator.simulated_prompts import CompletionLengths
from streamrl.planner.simulator.simulated_queue import SimulatedGroup, SimulatedQueue
from streamrl.stream.device_lease import (
    DedicatedDeviceLease,
    DeviceArbiter,
    SharedDeviceLease,
    SuspendableWork,
)
from streamrl.stream.protocols import DeviceLease
from streamrl.stream.stage_worker import split_slots
from streamrl.telemetry.spans import Span, SpanArgValue
from streamrl.weights import WeightManifest
from streamrl.weights.rank_slices import Readers
from streamrl.weights.versions import WeightRegistry

SpanArgs = Mapping[str, SpanArgValue]
NO_SPAN_ARGS: SpanArgs = {}
LAST_FACT = "lengths"
"""Fact that a generator knows at the end of its work."""


class ProcessRecorder:
    """Recorder of one process's spans; spans that overlap get different lanes."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.closed_spans: list[tuple[str, int, float, float, SpanArgs]] = []
        self._clock = asyncio.get_running_loop()
        self._free_lanes: list[int] = []
        self._open_spans: dict[int, tuple[str, float, SpanArgs]] = {}
        self._paused_names: Collection[str] = ()

    def begin_span(self, name: str, args: SpanArgs = NO_SPAN_ARGS) -> int:
        lane = heapq.heappop(self._free_lanes) if self._free_lanes else len(self._open_spans)
        self._open_spans[lane] = name, self._clock.time(), args
        return lane

    def end_span(self, lane: int) -> None:
        name, since, args = self._open_spans.pop(lane)
        heapq.heappush(self._free_lanes, lane)
        if name not in self._paused_names:
            self.closed_spans.append((name, lane, since, self._clock.time(), args))

    def pause_spans(self, names: Collection[str]) -> None:
        """End all open spans of these names; `resume_spans` begins them again.

        The ended part has no LAST_FACT: only the last part of a work carries it.
        """
        now, self._paused_names = self._clock.time(), names
        self.closed_spans += [
            (name, lane, since, now, {**args, LAST_FACT: ""})
            for lane, (name, since, args) in self._open_spans.items()
            if name in names
        ]

    def list_spans(self) -> list[Span]:
        return [Span(self.process, *work) for work in self.closed_spans]

    def resume_spans(self) -> None:
        now = self._clock.time()
        for lane, (name, _, args) in self._open_spans.items():
            if name in self._paused_names:
                self._open_spans[lane] = name, now, args
        self._paused_names = ()


TRAINER_PHASE = "trainer"
"""All trainers hold their devices in one common phase."""


class _UntimedArbiter:
    """Device arbiter in which waiting for a preemption never times out.

    In virtual time each poll of the real arbiter would cost an event.
    """

    def __init__(self, arbiter: DeviceArbiter) -> None:
        self._arbiter = arbiter
        self.acquire = arbiter.acquire
        self.release = arbiter.release
        self.report_progress = arbiter.report_progress

    async def wait_for_preemption(self, holder: str) -> bool:
        return await self._arbiter.wait_for_preemption(holder, math.inf)


class DeviceLeases:
    """Maker of the device leases of all simulated replicas.

    slice_s: placement.slice_s of a run. On policy a phase keeps its devices until its work ends.
    """

    def __init__(self, dataflow: Dataflow, placement: Placement, *, slice_s: float) -> None:
        self._trained_roles = dataflow.trained_roles
        self._devices_by_phase: dict[str, set[int]] = {}
        for call in dataflow.calls:
            if call.stage in placement.assignments:
                mesh = placement.assignments[call.stage].mesh
                self._devices_by_phase.setdefault(self._find_phase(call.role), set()).update(
                    mesh.devices
                )
        if not placement.max_staleness:
            slice_s = math.inf
        arbiter = DeviceArbiter(timeout_s=math.inf, slice_s=slice_s, slots=self._devices_by_phase)
        self._arbiter = _UntimedArbiter(arbiter)

    def _find_phase(self, role: str) -> str:
        return TRAINER_PHASE if role in self._trained_roles else role

    def make_lease(
        self, role: str, holder: str, *, suspendable: SuspendableWork | None = None
    ) -> SharedDeviceLease | None:
        """Return the device lease of a replica, or of all trainers together.

        Return None if its phase shares no device with other phases, or has no devices.

        suspendable: work to suspend when the arbiter preempts the lease.
        """
        phase = self._find_phase(role)
        devices = self._devices_by_phase.get(phase, set())
        other_phases = (
            other_devices
            for other, other_devices in self._devices_by_phase.items()
            if other != phase
        )
        if not any(devices & other_devices for other_devices in other_phases):
            return None
        return SharedDeviceLease(self._arbiter, holder, phase, suspendable=suspendable)


class SimulatedDeviceHold:
    """Holds a device lease while a replica has pending work.

    `on_granted` is called whenever the devices are granted. Without a lease the devices belong to
    the replica, and are granted at once.
    """

    def __init__(
        self, stage: str, lease: DeviceLease | None, on_granted: Callable[[], object]
    ) -> None:
        self._stage = stage
        self._lease = lease
        self._on_granted = on_granted
        self._num_pending = 0
        self._idle_event = asyncio.Event()
        self._hold_task: asyncio.Task[None] | None = None
        self.is_held = lease is None

    def begin_work(self, count: int = 1) -> None:
        """Count `count` more pieces of pending work; acquire the device lease with the first."""
        self._num_pending += count
        if self._lease is None:
            self._on_granted()
        elif self._hold_task is None:
            self._hold_task = asyncio.create_task(self._hold_lease(self._lease))
        elif self.is_held:
            self._on_granted()

    def end_work(self) -> None:
        """Count a piece of pending work as done; release the device lease after the last."""
        self._num_pending -= 1
        if not self._num_pending and self._lease is not None:
            self.is_held = False
            self._idle_event.set()

    async def _hold_lease(self, lease: DeviceLease) -> None:
        while self._num_pending:
            self._idle_event.clear()
            async with lease.hold(self._stage):
                self.is_held = bool(self._num_pending)
                if self.is_held:
                    self._on_granted()
                    await self._idle_event.wait()
        self._hold_task = None


class SimulatedWeightRegistry(WeightRegistry):
    """Weight registry that notifies followers of a new version; real followers poll."""

    def __init__(self) -> None:
        super().__init__(keep_versions=2)
        self.pullers: list[WeightPuller] = []

    def add_manifest(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        super().add_manifest(manifest, publish_s=publish_s)
        for puller in self.pullers:
            puller.pull_if_newer()


class VersionFollower(Protocol):
    """Protocol of a simulated replica with a copy of a trained model."""

    async def load_version(self, version: int, pause_s: float) -> None:
        """Simulate loading a version of the weights: compute nothing for `pause_s`."""
        ...

    def on_version_loaded(self) -> None: ...


class WeightPuller:
    """Pulls of weights by a single replica: one pull at a time, always of the newest version.

    call: names the followed model. lease: of the replica's devices; None if they are its own.
    loaded_version: version in the replica; -1 before the first pull.
    """

    def __init__(
        self,
        follower: VersionFollower,
        call: ModelCall,
        context: "SimulationContext",
        lease: DeviceLease | None,
        recorder: ProcessRecorder,
    ) -> None:
        self.loaded_version = -1
        self._follower = follower
        self._timing = context.timings.weights.get(call.stage, WeightsTiming())
        self._registry = context.registries[call.followed_role]
        self._lease = lease or DedicatedDeviceLease()
        self._recorder = recorder
        self._pull_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._registry.pullers.append(self)
        self.pull_if_newer()

    def pull_if_newer(self) -> None:
        """Start a pull if the registry has a newer version of the weights and no pull is
        running."""
        if self._pull_task is None and self._registry.version > self.loaded_version:
            self._pull_task = asyncio.create_task(self._pull_newest())

    async def _pull_newest(self) -> None:
        timing = self._timing
        while (version := self._registry.version) > self.loaded_version:
            await asyncio.sleep(max(0.0, timing.pull_s - timing.pause_s))
            async with self._lease.hold("load"):
                # Waiting for the devices of a pool is no work on them.
                lane = self._recorder.begin_span("pull", {"version": version})
                await self._follower.load_version(version, timing.pause_s)
                self._recorder.end_span(lane)
            self.loaded_version = version
            self._follower.on_version_loaded()
        self._pull_task = None


@dataclass
class SimulationContext:
    """Objects that all simulated processes of a run share.

    recorders: by process name.
    registries: weight registries by followed role.
    """

    timings: StageTimings
    queue: SimulatedQueue
    leases: DeviceLeases
    completions: CompletionLengths
    recorders: dict[str, ProcessRecorder]
    reference: ReferenceConfig
    registries: Mapping[str, SimulatedWeightRegistry]

    def get_recorder(self, process: str) -> ProcessRecorder:
        return self.recorders.setdefault(process, ProcessRecorder(process))


@dataclass(eq=False, slots=True)
class GroupWork:
    """A group that a generator samples for a stage, in lane `lane` of its spans."""

    group: SimulatedGroup
    stage: str
    lengths: Sequence[int] = ()
    lane: int = -1


class SimulatedGenerator:
    """Simulated generator, which samples groups for every generate stage with free slots.

    Sampling of a group begins when the generator has loaded the version at which the group was
    admitted, and holds its devices.
    """

    def __init__(
        self,
        process: str,
        calls: Sequence[ModelCall],
        context: SimulationContext,
        pool: "GeneratorPool",
    ) -> None:
        self._context = context
        self._recorder = context.get_recorder(process)
        timing = context.timings.generator
        self._begin_s = timing.begin_s
        stages, group_size = [call.stage for call in calls], context.completions.group_size
        self._slots = split_slots(timing.max_running, stages, group_size=group_size)
        self._engine: SimulatedEngine[GroupWork] = SimulatedEngine(
            timing, list(self._slots.values())
        )
        self._generator_pool, lease = pool, pool.lease
        self._device_hold = SimulatedDeviceHold(calls[0].stage, lease, self._start_sampling)
        self._weight_puller = WeightPuller(self, calls[0], context, lease, self._recorder)
        self._awaiting_version: list[GroupWork] = []
        self._ready_works: list[GroupWork] = []
        self._clock = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def start(self) -> None:
        """Start to pull weights; the first loaded version starts the requests for groups."""
        self._generator_pool.replicas.append(self)
        self._weight_puller.start()

    # Called by the queue (GroupConsumer).

    def count_free_slots(self, stage: str) -> int:
        return self._slots[stage].available_groups

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        slots = self._slots[stage]
        self._engine.reserve_slots(slots, len(groups) * slots.slots_per_group)
        self._update_timer()
        works = [GroupWork(group, stage) for group in groups]
        if self._begin_s:
            self._clock.call_later(self._begin_s, self._enqueue_works, works)
        else:
            self._enqueue_works(works)

    def _enqueue_works(self, works: Sequence[GroupWork]) -> None:
        loaded_version = self._weight_puller.loaded_version
        self._awaiting_version += [
            work for work in works if work.group.admitted_version > loaded_version
        ]
        ready = [work for work in works if work.group.admitted_version <= loaded_version]
        if ready:
            self._ready_works += ready
            self._device_hold.begin_work(len(ready))

    def _start_sampling(self) -> None:
        now, works = self._clock.time(), self._ready_works
        self._ready_works, completions = [], self._context.completions
        for work in works:
            uid, prompt_tokens = work.group.uid, completions.prompt_tokens
            work.lengths = completions.get_lengths(uid)
            if work.stage == GREEDY_CALL.stage:
                work.lengths = [completions.get_greedy_length(uid)]
            text = " ".join(map(str, work.lengths))
            facts: SpanArgs = {"uid": uid, "prompt": prompt_tokens, LAST_FACT: text}
            work.lane = self._recorder.begin_span(work.stage, facts)
            self._engine.add_group(work, prompt_tokens, work.lengths, now, self._slots[work.stage])
        self._update_timer()

    # Called by the weight puller (VersionFollower).

    async def load_version(self, version: int, pause_s: float) -> None:
        until = self._engine.load_version(version, pause_s, self._clock.time())
        self._update_timer()
        await sleep_until(until)

    def on_version_loaded(self) -> None:
        waiting_works, self._awaiting_version = self._awaiting_version, []
        self._enqueue_works(waiting_works)
        self._request_groups()

    # Called by the generator pool when the device arbiter preempts the generators.

    def pause(self) -> float:
        """Stop decoding at the end of the current decode step; return the time of that end."""
        until = self._engine.pause(self._clock.time())
        self._update_timer()
        return until

    def pause_spans(self) -> None:
        self._recorder.pause_spans(self._slots)

    def resume(self) -> None:
        self._engine.resume(self._clock.time())
        self._recorder.resume_spans()
        self._update_timer()

    # Engine events.

    def _update_timer(self) -> None:
        """Set the timer to the engine's next event."""
        at = self._engine.next_event_s
        if at != self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = self._clock.call_at(at, self._on_timer) if at < math.inf else None

    def _on_timer(self) -> None:
        # The event's own time: that of the loop may be less by a rounding error, and the event
        # would then be missed.
        at, self._timer_at = self._timer_at, math.inf
        done = self._engine.advance_to(at)
        self._update_timer()
        self._finish_groups(done)

    def _finish_groups(self, done: Sequence[RunningGroup[GroupWork]]) -> None:
        """Commit sampled groups, and request others for their slots."""
        finished: dict[str, list[SimulatedGroup]] = {}
        for sampling in done:
            work = sampling.key
            self._recorder.end_span(work.lane)
            self._set_group_info(work, sampling.tokens_by_version)
            finished.setdefault(work.stage, []).append(work.group)
            self._device_hold.end_work()
        for stage, groups in finished.items():
            self._context.queue.commit_groups(stage, groups)
        self._request_groups()

    def _request_groups(self) -> None:
        for stage, slots in self._slots.items():
            if slots.free_slots > 0:
                self._context.queue.request_groups(stage, self)

    def _set_group_info(self, work: GroupWork, tokens_by_version: Mapping[int, int]) -> None:
        """Record a sampled group for later stages."""
        completions, group = self._context.completions, work.group
        if work.stage == GREEDY_CALL.stage:
            group.greedy_tokens = completions.prompt_tokens + work.lengths[0]
        else:
            rollout_tokens = tuple(completions.get_rollout_tokens(group.uid))
            versions = tuple(sorted(tokens_by_version.items()))
            group.is_filtered = completions.is_filtered(group.uid)
            group.info = GroupInfo(rollout_tokens, sum(work.lengths), versions)


async def sleep_until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))


class GeneratorPool:
    """All live generators of a run, which acquire and release shared devices together."""

    def __init__(self, role: str, context: SimulationContext) -> None:
        self.replicas: list[SimulatedGenerator] = []
        self.lease = context.leases.make_lease(role, role, suspendable=self)

    async def suspend(self) -> None:
        await sleep_until(max((generator.pause() for generator in self.replicas), default=0.0))
        for generator in self.replicas:
            generator.pause_spans()

    async def resume(self) -> None:
        for generator in self.replicas:
            generator.resume()


@dataclass(frozen=True, eq=False)
class ScoreBatch:
    """Groups that a scorer scores in one batch for a stage."""

    stage: str
    groups: Sequence[SimulatedGroup]


class SimulatedScorer:
    """Simulated scorer, which serves all stages of a role.

    It leases at most two batches per stage: one in computation, one prefetched.
    """

    def __init__(
        self, process: str, calls: Sequence[ModelCall], context: SimulationContext
    ) -> None:
        self._context = context
        self._calls = {call.stage: call for call in calls}
        self._free_slots = {stage: 2 * context.timings.score[stage].batch for stage in self._calls}
        self._recorder = context.get_recorder(process)
        lease = context.leases.make_lease(calls[0].role, process)
        self._device_hold = SimulatedDeviceHold(calls[0].stage, lease, self._start_next_batch)
        self._weight_puller: WeightPuller | None = None
        if calls[0].followed_role:
            self._weight_puller = WeightPuller(self, calls[0], context, lease, self._recorder)
        self._awaiting_version: list[ScoreBatch] = []
        self._ready_batches: deque[ScoreBatch] = deque()
        self._is_busy = False

    def start(self) -> None:
        if self._weight_puller is not None:
            self._weight_puller.start()
        else:
            self.on_version_loaded()

    def _find_required_version(self, version: int) -> int:
        is_ema_reference = next(iter(self._calls.values())).followed_role == EMA_REFERENCE
        return (
            self._context.reference.find_reference_version(version) if is_ema_reference else version
        )

    def count_free_slots(self, stage: str) -> int:
        return self._free_slots[stage]

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        self._free_slots[stage] -= len(groups)
        size = self._context.timings.score[stage].batch
        self._enqueue_batches(
            [ScoreBatch(stage, groups[i : i + size]) for i in range(0, len(groups), size)]
        )

    def _enqueue_batches(self, batches: Sequence[ScoreBatch]) -> None:
        for batch in batches:
            newest = self._find_required_version(max(g.admitted_version for g in batch.groups))
            if self._weight_puller is not None and newest > self._weight_puller.loaded_version:
                self._awaiting_version.append(batch)
            else:
                self._ready_batches.append(batch)
                self._device_hold.begin_work()

    async def load_version(self, version: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    def on_version_loaded(self) -> None:
        waiting_batches, self._awaiting_version = self._awaiting_version, []
        self._enqueue_batches(waiting_batches)
        for stage, free_slots in self._free_slots.items():
            if free_slots:
                self._context.queue.request_groups(stage, self)

    def _start_next_batch(self) -> None:
        if self._is_busy or not self._ready_batches or not self._device_hold.is_held:
            return
        batch = self._ready_batches.popleft()
        rollouts, tokens = self._count_batch_tokens(batch)
        span_args = {"groups": len(batch.groups), "rollouts": rollouts, "tokens": tokens}
        lane = self._recorder.begin_span(batch.stage, span_args)
        self._is_busy = True
        seconds = self._context.timings.score[batch.stage].batch_duration_s(rollouts, tokens)
        asyncio.get_running_loop().call_later(seconds, self._finish_batch, batch, lane)

    def _count_batch_tokens(self, batch: ScoreBatch) -> tuple[int, int]:
        groups = batch.groups
        if "greedy_ids" in self._calls[batch.stage].needs:
            return len(groups), sum(group.greedy_tokens for group in groups)
        infos = [group.info for group in groups if group.info is not None]
        return sum(len(info.lengths) for info in infos), sum(info.num_tokens for info in infos)

    def _finish_batch(self, batch: ScoreBatch, lane: int) -> None:
        """Commit the scored groups of a batch, start the next batch, and request more groups.

        lane: lane of the batch's span.
        """
        self._is_busy = False
        self._recorder.end_span(lane)
        self._free_slots[batch.stage] += len(batch.groups)
        self._device_hold.end_work()
        self._start_next_batch()
        self._context.queue.commit_groups(batch.stage, batch.groups)
        self._context.queue.request_groups(batch.stage, self)


class SimulatedTrainer:
    """Trainer of a simulated run: each round, update and publication is a wait.

    publish_s: time until a published version can be pulled.
    devices: lock shared with other trainers on the same devices, held during computation.
    """

    def __init__(
        self,
        timing: TrainTiming,
        update_plan: UpdatePlan,
        *,
        publish_s: float,
        completions: CompletionLengths,
        recorder: ProcessRecorder,
        devices: asyncio.Lock | None = None,
    ) -> None:
        self.dp_size = timing.dp_size
        self.update_plan = update_plan
        self._timing = timing
        self._publish_s = publish_s
        self._completions = completions
        self._recorder = recorder
        self._device_lock = devices

    def begin_step(self, version: int, adaptive_params: Mapping[str, float]) -> None:
        pass

    def is_frozen(self, version: int) -> bool:
        return False

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        await self._run_work("plan", self._timing.step_s)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """Wait as long as the data-parallel rank with the round's largest micro-batch computes."""
        rollouts, longest_s, span_args = 0, 0.0, NO_SPAN_ARGS
        get_tokens = self._completions.get_rollout_tokens
        for micro_batch in work:
            if micro_batch:
                tokens = sum([get_tokens(uid)[index] for uid, index in micro_batch])
                seconds = self._timing.micro_batch_s + self._timing.token_s * tokens
                if seconds > longest_s:
                    longest_s, span_args = seconds, {"rollouts": len(micro_batch), "tokens": tokens}
                rollouts += len(micro_batch)
        # The round's dispatch occupies no devices.
        await asyncio.sleep(self._timing.round_s)
        await self._run_work("train", longest_s, span_args)
        return {"rollouts": float(rollouts)}

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        await asyncio.sleep(self._timing.round_s)
        await self._run_work("update", self._timing.update_s)
        return {}

    async def publish_weights(self, version: int, readers: Readers) -> WeightManifest:
        lane = self._recorder.begin_span("publish", {"version": version})
        await asyncio.sleep(self._publish_s)
        self._recorder.end_span(lane)
        return WeightManifest(version, (), ())

    async def _run_work(
        self, name: str, seconds: float, span_args: SpanArgs = NO_SPAN_ARGS
    ) -> None:
        """Occupy the trainer's devices, recorded as a span."""
        devices: AbstractAsyncContextManager[object] = self._device_lock or nullcontext()
        async with devices:
            lane = self._recorder.begin_span(name, span_args)
            await asyncio.sleep(seconds)
            self._recorder.end_span(lane)


async def publish_reference(publish_s: float, version: int, readers: Readers) -> WeightManifest:
    """Publish an EMA reference, which the policy's trainer computes, in `publish_s`."""
    await asyncio.sleep(publish_s)
    return WeightManifest(version, (), ())
