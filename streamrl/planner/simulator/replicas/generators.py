"""Simulated generator replica: leases prompts, samples groups in its engine, follows the policy.

An episode is a loop through the engine and its environment:

    seconds of the environment -> a turn in the engine, with slot and lease -> ... -> final seconds

The environment takes no slot of the engine, no lease and no core: its seconds are a mere delay.
"""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.dataflow import GREEDY_CALL, ModelCall
from streamrl.messages import GroupInfo
from streamrl.planner.problem.stage_timings import WeightsTiming
from streamrl.planner.simulator.replicas.context import SimulationContext
from streamrl.planner.simulator.replicas.cpu_model import CpuTimer
from streamrl.planner.simulator.replicas.device_hold import SimulatedDeviceHold
from streamrl.planner.simulator.replicas.simulated_engine import RunningGroup, SimulatedEngine
from streamrl.planner.simulator.replicas.simulated_queue import SimulatedGroup
from streamrl.planner.simulator.replicas.weight_followers import WeightPuller
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.stage_worker import split_slots
from streamrl.telemetry.spans import SpanArgValue


@dataclass(eq=False, slots=True)
class GroupWork:
    """A group that a generator samples for a stage.

    priority: number of the group, in the order in which sampling begins.
    num_open: requests of the group that have not ended.
    tokens_by_version: tokens sampled in turns that have ended.
    """

    group: SimulatedGroup
    stage: str
    priority: int = 0
    num_open: int = 0
    tokens_by_version: Counter[int] = field(default_factory=Counter)


class RequestTurn(NamedTuple):
    """Turn of a request: as `TurnWork`, with the sampled tokens of each rollout."""

    environment_s: float
    observed_tokens: int
    lengths: Sequence[int]


@dataclass(eq=False, slots=True)
class SampleRequest:
    """Rollouts of a group that are sampled together, turn by turn.

    They are a single episode, or, without an environment, all rollouts of the group.

    index: number of the request within the group.
    final_s: seconds of the environment after the last turn.
    turn: number of turns that have ended.
    context: tokens of the rollout so far, prompt included.
    environment_s: seconds of the environment so far.
    version: version of the engine at the end of the last turn, to which cached tokens belong.
    lane: that of the span of the turn that is sampled.
    """

    work: GroupWork
    index: int
    turns: Sequence[RequestTurn]
    final_s: float
    context: int
    turn: int = 0
    environment_s: float = 0.0
    version: int = -1
    lane: int = -1

    @property
    def next_turn(self) -> RequestTurn:
        return self.turns[self.turn]

    @property
    def ends_with_turn(self) -> bool:
        """Whether the rollouts end together with the turn that is sampled."""
        return self.turn + 1 == len(self.turns) and not self.final_s

    def end_turn(self, version: int) -> None:
        turn = self.next_turn
        self.context += turn.observed_tokens + turn.lengths[0]
        self.turn, self.version = self.turn + 1, version


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
        self._slots = split_slots(context.max_open_rollouts, stages, group_size=group_size)
        self._engine: SimulatedEngine[SampleRequest] = SimulatedEngine(
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
        self._ready_requests: list[SampleRequest] = []
        self._open_works: set[GroupWork] = set()
        self._priorities = itertools.count()
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
        lost += sum(work.tokens_by_version.total() for work in self._open_works)
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
            self._await_environment(
                [request for work in ready for request in self._open_requests(work)]
            )

    def _open_requests(self, work: GroupWork) -> Iterator[SampleRequest]:
        """Yield the requests of a group, whose sampling begins."""
        completions, uid = self._context.completions, work.group.uid
        work.priority, prompt_tokens = next(self._priorities), completions.prompt_tokens
        self._open_works.add(work)
        if not completions.has_environment:
            greedy = work.stage == GREEDY_CALL.stage
            lengths = (
                [completions.get_greedy_length(uid)] if greedy else completions.get_lengths(uid)
            )
            work.num_open = 1
            yield SampleRequest(work, 0, [RequestTurn(0.0, 0, lengths)], 0.0, prompt_tokens)
            return
        episodes = completions.get_episodes(uid)
        work.num_open = len(episodes)
        for index, episode in enumerate(episodes):
            turns = [
                RequestTurn(turn.environment_s, turn.observed_tokens, [turn.sampled_tokens])
                for turn in episode.turns
            ]
            yield SampleRequest(work, index, turns, episode.final_s, prompt_tokens)

    def _await_environment(self, requests: Sequence[SampleRequest]) -> None:
        """Start the next turn of each request once its environment has answered."""
        clock, answered = asyncio.get_running_loop(), []
        for request in requests:
            seconds = request.next_turn.environment_s
            request.environment_s += seconds
            if seconds:
                clock.call_later(seconds, self._start_turns, [request])
            else:
                answered.append(request)
        if answered:
            self._start_turns(answered)

    def _start_turns(self, requests: Sequence[SampleRequest]) -> None:
        if not self._is_dead:
            self._ready_requests += requests
            self._device_hold.begin_work(len(requests))

    def _start_sampling(self) -> None:
        now, ready_requests = self._context.cpu.now, self._ready_requests
        self._ready_requests = []
        for request in ready_requests:
            work, turn = request.work, request.next_turn
            request.lane = self._recorder.begin_span(work.stage, self._make_span_args(request))
            self._engine.add_group(
                request,
                request.context + turn.observed_tokens,
                turn.lengths,
                now,
                self._slots[work.stage] if request.ends_with_turn else None,
                priority=work.priority,
                cached=(request.context, request.version) if request.turn else (0.0, -1),
            )
        self._update_timer()

    def _make_span_args(self, request: SampleRequest) -> dict[str, SpanArgValue]:
        """Return the facts that a real generator records with a group, or with a turn."""
        uid, turn = request.work.group.uid, request.next_turn
        if not self._context.completions.has_environment:
            text = " ".join(map(str, turn.lengths))
            return {"uid": uid, "prompt": request.context, "lengths": text}
        return {
            "uid": uid,
            "episode": request.index,
            "turn": request.turn,
            "context": request.context + turn.observed_tokens,
            "environment_s": request.environment_s,
            "tokens": turn.lengths[0],
        }

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
        self._finish_turns(done)

    def _finish_turns(self, done: Sequence[RunningGroup[SampleRequest]]) -> None:
        clock, ended = asyncio.get_running_loop(), []
        for sampling in done:
            request = sampling.key
            self._recorder.end_span(request.lane)
            request.work.tokens_by_version.update(sampling.tokens_by_version)
            request.end_turn(self._engine.version)
            if request.turn < len(request.turns):
                self._await_environment([request])
            elif request.final_s:
                clock.call_later(request.final_s, self._end_episode, request)
            else:
                ended.append(request)
            self._device_hold.end_work()
        self._end_requests(ended)
        self._request_groups()

    def _end_episode(self, request: SampleRequest) -> None:
        """End an episode after the final seconds of its environment; return its slot."""
        if not self._is_dead:
            self._slots[request.work.stage].free_slots += 1
            self._end_requests([request])
            self._request_groups()

    def _end_requests(self, requests: Sequence[SampleRequest]) -> None:
        """Commit the groups whose last request has ended."""
        finished: dict[str, list[SimulatedGroup]] = {}
        for request in requests:
            work = request.work
            work.num_open -= 1
            if not work.num_open:
                self._open_works.remove(work)
                self._set_group_info(work)
                finished.setdefault(work.stage, []).append(work.group)
        for stage, groups in finished.items():
            self._context.queue.commit_groups(stage, groups)

    def _request_groups(self) -> None:
        for stage, slots in self._slots.items():
            if slots.free_slots > 0:
                self._context.queue.request_groups(stage, self)

    def _set_group_info(self, work: GroupWork) -> None:
        """Record a sampled group for later stages."""
        completions, group = self._context.completions, work.group
        if work.stage == GREEDY_CALL.stage:
            group.greedy_tokens = completions.prompt_tokens + completions.get_greedy_length(
                group.uid
            )
        else:
            versions = tuple(sorted(work.tokens_by_version.items()))
            num_sampled = sum(completions.get_lengths(group.uid))
            rollout_tokens = tuple(completions.get_rollout_tokens(group.uid))
            group.is_filtered = completions.is_filtered(group.uid)
            num_turns = 0
            if completions.has_environment:
                num_turns = sum(len(e.turns) for e in completions.get_episodes(group.uid))
            group.info = GroupInfo(rollout_tokens, num_sampled, versions, num_turns)


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
