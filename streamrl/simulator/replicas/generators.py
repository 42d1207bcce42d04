"""Simulated generator replica: leases prompts, samples groups in its engine, follows the policy."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.dataflow import GREEDY_CALL, ModelCall
from streamrl.messages import GroupInfo
from streamrl.placement.stage_timings import WeightsTiming
from streamrl.simulator.replicas.context import SimulationContext
from streamrl.simulator.replicas.cpu_model import CpuTimer
from streamrl.simulator.replicas.device_hold import SimulatedDeviceHold
from streamrl.simulator.replicas.simulated_engine import RunningGroup, SimulatedEngine
from streamrl.simulator.replicas.simulated_queue import SimulatedGroup
from streamrl.simulator.replicas.weight_followers import WeightPuller
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.stage_worker import split_slots
from streamrl.telemetry.spans import SpanArgValue


@dataclass(eq=False, slots=True)
class GroupWork:
    """A group that a generator samples for a stage; `lane` is that of its span."""

    group: SimulatedGroup
    stage: str
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
        self.process = process
        self._context = context
        self._recorder = context.recordings.get_recorder(process)
        timing = context.timings.generator
        self._begin_s = timing.begin_s
        stages, group_size = [call.stage for call in calls], context.completions.group_size
        self._slots = split_slots(timing.max_running, stages, group_size=group_size)
        self._engine: SimulatedEngine[GroupWork] = SimulatedEngine(
            timing, list(self._slots.values())
        )
        self._generator_pool, lease = pool, pool.lease
        self._device_hold = SimulatedDeviceHold(calls[0].stage, lease, self._start_sampling)
        self._weight_puller = WeightPuller(
            self,
            context.timings.weights.get(calls[0].stage, WeightsTiming()),
            context.registries[calls[0].followed_role],
            lease or DedicatedDeviceLease(),
            self._recorder,
        )
        self._awaiting_version: list[GroupWork] = []
        self._ready_works: list[GroupWork] = []
        self._timer: CpuTimer | None = None
        self._timer_at = math.inf
        self._is_busy = self._is_dead = False

    def start(self) -> None:
        """Start to pull weights; the first loaded version starts the requests for groups."""
        self._generator_pool.replicas.append(self)
        self._weight_puller.start()

    def kill(self) -> int:
        """Crash the generator: requeue its groups and return the number of sampled tokens lost."""
        self._engine.pause(self._context.cpu.now)
        lost = self._engine.count_sampled_tokens()
        self._is_dead = True
        self._generator_pool.replicas.remove(self)
        self._device_hold.close()
        self._weight_puller.close()
        self._engine = SimulatedEngine(self._context.timings.generator)
        self._update_timer()
        self._recorder.close_spans()
        self._context.queue.requeue_groups(self)
        return lost

    # Called by the queue (GroupConsumer).

    def count_free_slots(self, stage: str) -> int:
        return 0 if self._is_dead else self._slots[stage].available_groups

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        slots = self._slots[stage]
        self._engine.reserve_slots(slots, len(groups) * slots.slots_per_group)
        self._update_timer()
        works = [GroupWork(group, stage) for group in groups]
        if self._begin_s:
            asyncio.get_running_loop().call_later(self._begin_s, self._enqueue_works, works)
        else:
            self._enqueue_works(works)

    def _enqueue_works(self, works: Sequence[GroupWork]) -> None:
        loaded_version = self._weight_puller.loaded_version
        self._awaiting_version += [
            work for work in works if work.group.admitted_version > loaded_version
        ]
        ready = [work for work in works if work.group.admitted_version <= loaded_version]
        if ready and not self._is_dead:
            self._ready_works += ready
            self._device_hold.begin_work(len(ready))

    def _start_sampling(self) -> None:
        completions, now = self._context.completions, self._context.cpu.now
        ready_works, self._ready_works = self._ready_works, []
        for work in ready_works:
            uid = work.group.uid
            greedy = work.stage == GREEDY_CALL.stage
            lengths = (
                [completions.get_greedy_length(uid)] if greedy else completions.get_lengths(uid)
            )
            text, tokens = " ".join(map(str, lengths)), completions.prompt_tokens
            span_args: dict[str, SpanArgValue] = {"uid": uid, "prompt": tokens, "lengths": text}
            work.lane = self._recorder.begin_span(work.stage, span_args)
            self._engine.add_group(work, tokens, lengths, now, self._slots[work.stage])
        self._update_timer()

    # Called by the weight puller (VersionFollower).

    async def load_version(self, version: int, pause_s: float) -> None:
        cpu = self._context.cpu
        until = self._engine.load_version(version, pause_s, cpu.now)
        self._update_timer()
        await cpu.wait_until(until)

    def on_version_loaded(self) -> None:
        waiting_works, self._awaiting_version = self._awaiting_version, []
        self._enqueue_works(waiting_works)
        self._request_groups()

    # Called by the generator pool when the device arbiter preempts the generators.

    def pause(self) -> float:
        """Stop decoding at the end of the current decode step; return the time of that end."""
        until = self._engine.pause(self._context.cpu.now)
        self._update_timer()
        return until

    def pause_spans(self) -> None:
        self._recorder.pause_spans(self._slots)

    def resume(self) -> None:
        self._engine.resume(self._context.cpu.now)
        self._recorder.resume_spans()
        self._update_timer()

    # Engine events.

    def _update_timer(self) -> None:
        """Set the timer to the engine's next event, and update the CPU model's busy processes."""
        cpu, engine = self._context.cpu, self._engine
        at = engine.next_event_s
        if at != self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = cpu.call_at(at, self._on_timer) if at < math.inf else None
        if engine.is_busy != self._is_busy:
            self._is_busy = engine.is_busy
            cpu.adjust_busy(1 if self._is_busy else -1)

    def _on_timer(self) -> None:
        # The event's own time: `now` of the CPU model may be less by a rounding error, and the
        # event would then be missed.
        at, self._timer_at = self._timer_at, math.inf
        done = self._engine.advance_to(at)
        self._update_timer()
        self._finish_groups(done)

    def _finish_groups(self, done: Sequence[RunningGroup[GroupWork]]) -> None:
        finished: dict[str, list[SimulatedGroup]] = {}
        for sampling in done:
            work = sampling.key
            self._recorder.end_span(work.lane)
            self._set_group_info(work, sampling.tokens_by_version)
            self._device_hold.end_work()
            finished.setdefault(work.stage, []).append(work.group)
        for stage, groups in finished.items():
            self._context.queue.commit_groups(stage, groups)
        self._request_groups()

    def _request_groups(self) -> None:
        for stage, slots in self._slots.items():
            if slots.free_slots > 0:
                self._context.queue.request_groups(stage, self)

    def _set_group_info(self, work: GroupWork, versions: Mapping[int, int]) -> None:
        """Record a sampled group for later stages; versions: sampled tokens by version."""
        completions, group = self._context.completions, work.group
        prompt_tokens = completions.prompt_tokens
        if work.stage == GREEDY_CALL.stage:
            group.greedy_tokens = prompt_tokens + completions.get_greedy_length(group.uid)
        else:
            lengths = completions.get_lengths(group.uid)
            rollout_tokens = tuple([prompt_tokens + tokens for tokens in lengths])
            group.is_filtered = completions.is_filtered(group.uid)
            group.info = GroupInfo(rollout_tokens, sum(lengths), tuple(sorted(versions.items())))


class GeneratorPool:
    """All live generators of a run, which acquire and release shared devices together."""

    def __init__(self, role: str, context: SimulationContext, *, holder: str) -> None:
        """Create a pool without generators; `holder` is a new name for the device arbiter."""
        self.replicas: list[SimulatedGenerator] = []
        self.lease = context.leases.make_lease(role, holder, suspendable=self)
        self._cpu = context.cpu

    async def suspend(self) -> None:
        await self._cpu.wait_until(
            max((generator.pause() for generator in self.replicas), default=0.0)
        )
        for generator in self.replicas:
            generator.pause_spans()

    async def resume(self) -> None:
        for generator in self.replicas:
            generator.resume()
