"""A generator replica: takes prompts, samples their groups together, follows the policy."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.dataflow import GREEDY_CALL, ModelCall
from streamrl.messages import GroupInfo
from streamrl.placement.stage_timings import WeightsTiming
from streamrl.simulator.replicas.context import SimulationContext
from streamrl.simulator.replicas.cpu_model import CpuTimer
from streamrl.simulator.replicas.device_hold import DeviceHold
from streamrl.simulator.replicas.engine import RunningGroup, SimulatedEngine
from streamrl.simulator.replicas.queue import SimulatedGroup
from streamrl.simulator.replicas.weight_followers import WeightPuller
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.stage_worker import split_slots
from streamrl.telemetry.spans import SpanArgValue


@dataclass(eq=False, slots=True)
class GroupWork:
    """A group that is sampled for a stage, and the lane of its span once it is."""

    group: SimulatedGroup
    stage: str
    lane: int = -1


class SimulatedGenerator:
    """Serves all stages that generate, each while it has a free place.

    A group begins once the version it was admitted at is held, and the replica has its devices.
    """

    def __init__(
        self,
        process: str,
        calls: Sequence[ModelCall],
        site: SimulationContext,
        fleet: "GeneratorPool",
    ) -> None:
        """`fleet` are all of its role."""
        self.process = process
        self._context = site
        self._recorder = site.recordings.get_recorder(process)
        timing = site.timings.generator
        self._begin_s = timing.begin_s
        stages, group_size = [call.stage for call in calls], site.completions.group_size
        self._slots = split_slots(timing.max_running, stages, group_size=group_size)
        self._engine: SimulatedEngine[GroupWork] = SimulatedEngine(
            timing, list(self._slots.values())
        )
        self._generator_pool, lease = fleet, fleet.lease
        self._device_hold = DeviceHold(calls[0].stage, lease, self._start_sampling)
        self._weight_puller = WeightPuller(
            self,
            site.timings.weights.get(calls[0].stage, WeightsTiming()),
            site.registries[calls[0].followed_role],
            lease or DedicatedDeviceLease(),
            self._recorder,
        )
        self._awaiting_version: list[GroupWork] = []
        self._ready_works: list[GroupWork] = []
        self._timer: CpuTimer | None = None
        self._timer_at = math.inf
        self._is_busy = self._is_dead = False

    def start(self) -> None:
        """Take groups once there is a version to sample them from."""
        self._generator_pool.replicas.append(self)
        self._weight_puller.start()

    def kill(self) -> int:
        """What it was at is lost, and handed out again; returns the tokens that were sampled."""
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

    # What the queue asks for.

    def count_free_slots(self, stage: str) -> int:
        """How many groups more it may be given."""
        return 0 if self._is_dead else self._slots[stage].available_groups

    def assign_groups(self, stage: str, groups: Sequence[SimulatedGroup]) -> None:
        """It has these from now on."""
        places = self._slots[stage]
        self._engine.reserve_slots(places, len(groups) * places.slots_per_group)
        self._update_timer()
        works = [GroupWork(group, stage) for group in groups]
        if self._begin_s:
            asyncio.get_running_loop().call_later(self._begin_s, self._enqueue_works, works)
        else:
            self._enqueue_works(works)

    def _enqueue_works(self, works: Sequence[GroupWork]) -> None:
        held = self._weight_puller.loaded_version
        self._awaiting_version += [work for work in works if work.group.admitted_version > held]
        ready = [work for work in works if work.group.admitted_version <= held]
        if ready and not self._is_dead:
            self._ready_works += ready
            self._device_hold.begin_work(len(ready))

    def _start_sampling(self) -> None:
        """It has its devices: whatever is begun is sampled."""
        completions, now = self._context.completions, self._context.cpu.now
        begun, self._ready_works = self._ready_works, []
        for work in begun:
            uid = work.group.uid
            greedy = work.stage == GREEDY_CALL.stage
            lengths = (
                [completions.get_greedy_length(uid)] if greedy else completions.get_lengths(uid)
            )
            told = " ".join(map(str, lengths))
            tokens = completions.prompt_tokens
            facts: dict[str, SpanArgValue] = {"uid": uid, "prompt": tokens, "lengths": told}
            work.lane = self._recorder.begin_span(work.stage, facts)
            self._engine.add_group(work, tokens, lengths, now, self._slots[work.stage])
        self._update_timer()

    # What the weights ask for.

    async def load_version(self, version: int, pause_s: float) -> None:
        """Sample from this version from the next step on."""
        machine = self._context.cpu
        until = self._engine.load_version(version, pause_s, machine.now)
        self._update_timer()
        await machine.wait_until(until)

    def on_version_loaded(self) -> None:
        """A version is held: what was admitted at it can begin."""
        early, self._awaiting_version = self._awaiting_version, []
        self._enqueue_works(early)
        self._request_groups()

    # What those ask for who share its devices.

    def pause(self) -> float:
        """Sample nothing from the end of this step on, which is returned."""
        until = self._engine.pause(self._context.cpu.now)
        self._update_timer()
        return until

    def pause_spans(self) -> None:
        """The step has ended: it does nothing."""
        self._recorder.pause_spans(self._slots)

    def resume(self) -> None:
        """Sample again."""
        self._engine.resume(self._context.cpu.now)
        self._recorder.resume_spans()
        self._update_timer()

    # How it goes on.

    def _update_timer(self) -> None:
        """Ring when something is to happen next."""
        machine, engine = self._context.cpu, self._engine
        at = engine.next_event_s
        if at != self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = machine.call_at(at, self._on_timer) if at < math.inf else None
        if engine.is_busy != self._is_busy:
            self._is_busy = engine.is_busy
            machine.adjust_busy(1 if self._is_busy else -1)

    def _on_timer(self) -> None:
        # Not the machine's time, which may be less by a rounding error.
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
        """For groups of each stage that has places."""
        for stage, places in self._slots.items():
            if places.free_slots > 0:
                self._context.queue.request_groups(stage, self)

    def _set_group_info(self, work: GroupWork, versions: Mapping[int, int]) -> None:
        """What is known of a group from now on."""
        completions, group = self._context.completions, work.group
        prompt_tokens = completions.prompt_tokens
        if work.stage == GREEDY_CALL.stage:
            group.greedy_tokens = prompt_tokens + completions.get_greedy_length(group.uid)
        else:
            lengths = completions.get_lengths(group.uid)
            whole = tuple([prompt_tokens + tokens for tokens in lengths])
            group.is_filtered = completions.is_filtered(group.uid)
            group.info = GroupInfo(whole, sum(lengths), tuple(sorted(versions.items())))


class GeneratorPool:
    """All generators that are there. They have their devices together, and give way together."""

    def __init__(self, role: str, site: SimulationContext, *, holder: str) -> None:
        """`holder` is their name among those who share devices, unlike any before."""
        self.replicas: list[SimulatedGenerator] = []
        self.lease = site.leases.make_lease(role, holder, suspendable=self)
        self._cpu = site.cpu

    async def suspend(self) -> None:
        """All stand still, each from the end of its step on."""
        await self._cpu.wait_until(max((one.pause() for one in self.replicas), default=0.0))
        for one in self.replicas:
            one.pause_spans()

    async def resume(self) -> None:
        """All go on."""
        for one in self.replicas:
            one.resume()
