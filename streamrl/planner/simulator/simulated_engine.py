"""Model of one generator's engine: continuous batching of rollouts under a KV-cache limit.

The engine does not simulate single tokens. Between two events the set of running rollouts stays the
same, and each decode step adds one token per running rollout to the KV cache. The time of n such
steps then has a closed form (`GeneratorTiming.decode_run_s`). Events: a group finishes, a slot pool
gets a free slot, a waiting rollout can start, or the KV cache fills up and a rollout is preempted.

Timeline of an engine with two slots (max_running=2) and three rollouts a, b, c:

    steps    0        4      7     9
    slot 1   aaaaaaaaaccccccc|          c starts when a ends
    slot 2   bbbbbbbbbbbbbbbbbbbbbb|
    events            ^      ^     ^

Times are seconds on the caller's clock. A call in the middle of a decode step takes effect at the
end of that step, and `now` is then that end. A group is done at the end of its last step;
delivering it delays the next step by `group_s`.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, TypeVar

from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.stream.stage_worker import ConcurrencyLimit

K = TypeVar("K")
MAX_STARTED = 8
"""Rollouts to remember per running one before the finished ones are dropped."""


@dataclass(eq=False, slots=True)
class RunningGroup(Generic[K]):
    """A group being sampled, with the number of sampled tokens by version.

    slots: the pool to which finished rollouts return their slots.
    num_waiting: rollouts without a slot in the engine.
    last_slot, end_step: slot and last decode step of the running rollout that ends last.
    """

    key: K
    slots: ConcurrencyLimit
    num_waiting: int
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    last_slot: int = -1
    end_step: int = -1


_RunningRollout = tuple[int, int, RunningGroup[K], int, float]
"""A rollout with a slot: last step, slot number, group, first step, KV-cache tokens at that step.

Slot numbers rise with every start, so the highest is the newest rollout. Plain tuples: a simulation
creates millions of them, and they sort without a key.
"""
_WaitingRollout = tuple[RunningGroup[K], float, int]
"""A rollout without a slot: group, tokens before the next sampled token, tokens still to sample."""


class SimulatedEngine(Generic[K]):
    """Continuous batching of a generator's rollouts; the caller identifies each group by a key.

    A waiting rollout starts, in order of arrival, when fewer than `max_running` run and the KV
    cache has room for its tokens plus one more token of every running rollout. When the cache is
    full, the newest rollout is preempted: it moves to the head of the waiting queue, and its tokens
    are prefilled again.
    """

    def __init__(
        self,
        timing: GeneratorTiming,
        slot_pools: Sequence[ConcurrencyLimit] = (),
        *,
        log: list[tuple[int, int, float]] | None = None,
    ) -> None:
        """Create an engine without groups.

        slot_pools: a free slot in one of these full pools is an event, so that the caller can
        request another group. log: gets, for each rollout that ends or is preempted, its first and
        last decode step and its KV-cache tokens at the first.
        """
        self._log = log
        self._timing = timing
        self._slot_pools = slot_pools
        self.now = 0.0
        """Time up to which the engine has been simulated, in seconds on the caller's clock."""
        self.decode_steps = 0
        self.resident_tokens = 0.0
        """Tokens in the KV cache."""
        self._running: list[_RunningRollout[K]] = []
        self._started: list[_RunningRollout[K]] = []
        """Rollouts in the order of their start, the finished ones included, to find the newest."""
        self._waiting: deque[_WaitingRollout[K]] = deque()
        self._finished_groups: deque[tuple[float, RunningGroup[K]]] = deque()
        self._last_slot = 0
        self._version_marks = [(0, -1)]
        self._is_paused = False
        self._slots_freed_s = math.inf
        """Time at which a full slot pool got a free slot; inf once `advance_to` has reported it."""
        self._plan: _EventPlan | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the engine has no running, waiting, or finished and not yet returned group."""
        return not self._running and not self._waiting and not self._finished_groups

    @property
    def next_event_s(self) -> float:
        """Time of the next event, to which a caller should advance the engine; inf without any."""
        if self._finished_groups:
            return self._finished_groups[0][0]
        if self._slots_freed_s < math.inf:
            return self._slots_freed_s
        return (
            self._get_plan().event_times[-1] if self._running and not self._is_paused else math.inf
        )

    def has_event_by(self, until: float) -> bool:
        """Return whether the engine's next event is at `until` or earlier.

        Faster than `next_event_s`, because events after `until` are not planned.
        """
        if self._finished_groups or self._slots_freed_s < math.inf:
            return self.next_event_s <= until
        if not self._running or self._is_paused:
            return False
        return self._get_plan(until).event_times[-1] <= until

    def reserve_slots(self, slots: ConcurrencyLimit, count: int) -> None:
        """Take `count` slots from a pool for a group that is added now or later."""
        slots.free_slots -= count
        if slots.free_slots <= 0:
            self._plan = None

    def add_group(
        self,
        key: K,
        prompt_tokens: float,
        lengths: Sequence[int],
        now: float,
        slots: ConcurrencyLimit | None = None,
    ) -> None:
        """Add a group with a completion of each of these lengths after a prompt, all in tokens.

        Each finished rollout returns a slot to `slots`.
        """
        self._finish_current_step(now)
        group = RunningGroup(key, slots or ConcurrencyLimit(0), len(lengths))
        self._plan = None
        self._waiting.extend((group, prompt_tokens, tokens) for tokens in lengths)
        self._start_waiting()

    def advance_to(self, now: float) -> list[RunningGroup[K]]:
        """Simulate the engine until `now` and return the groups that finished."""
        done: list[RunningGroup[K]] = []
        while self.next_event_s <= now:
            if not self._finished_groups and self._slots_freed_s == math.inf:
                self._apply_events(len(self._get_plan().event_times))
                self._preempt_newest()
                self._start_waiting()
            self._slots_freed_s = math.inf
            while self._finished_groups and self._finished_groups[0][0] <= now:
                done.append(self._finished_groups.popleft()[1])
        return done

    def load_version(self, version: int, pause_s: float, now: float) -> float:
        """Load other weights, which takes `pause_s`; return the time at which loading is complete.

        Generation continues at the returned time, or later where the engine has to recompute the KV
        cache: then it first prefills all tokens of its running rollouts.
        """
        self._finish_current_step(now)
        self._version_marks.append((self.decode_steps, version))
        until = self.now + pause_s
        self.now = until + self._timing.recompute_token_s * self.resident_tokens
        self._plan = None
        return until

    def pause(self, now: float) -> float:
        """Stop decoding at the end of the current decode step; return the time of that end."""
        self._finish_current_step(now)
        self._is_paused = True
        return self.now

    def resume(self, now: float) -> None:
        self.now = max(self.now, now)
        self._is_paused, self._plan = False, None
        self._start_waiting()

    def _finish_current_step(self, now: float) -> None:
        """Simulate until the end of the decode step that is in progress at time `now`."""
        if self._is_paused:
            return
        if not self._running:
            self.now = max(self.now, now)
            return
        if self.now >= now:
            return
        plan = self._get_plan(now)
        self._apply_events(bisect_right(plan.event_times, now, hi=len(plan.event_times) - 1))
        if self.now < now:
            steps = self._running[0][0] - self.decode_steps
            timing, count, resident = self._timing, len(self._running), self.resident_tokens
            num_steps = _count_steps_until(timing, count, resident, now - self.now, at_most=steps)
            self.now += timing.decode_run_s(count, resident, num_steps)
            self.decode_steps += num_steps
            self.resident_tokens += num_steps * len(self._running)
            self._finish_rollouts(bisect_right(self._running, self.decode_steps, key=itemgetter(0)))
            self._preempt_newest()
            self._start_waiting()
            self._plan = None

    def _get_plan(self, until: float = math.inf) -> "_EventPlan":
        plan = self._plan
        if plan is None or (plan.is_truncated and plan.event_times[-1] <= until):
            plan = self._plan = self._make_plan(until)
        return plan

    def _make_plan(self, until: float) -> "_EventPlan":
        """Plan the next events: when running rollouts end, up to the first end that is an event.

        The plan also ends with the first rollout that ends after `until`. Between two ends the
        batch has a constant size, so one call of `decode_run_s` covers all steps up to the next
        end. The plan stops early at the step in which the KV cache would overflow.
        """
        timing, waiting = self._timing, self._waiting
        now, step = self.now, self.decode_steps
        resident, count = self.resident_tokens, len(self._running)
        plan, is_event = _EventPlan([], []), False
        ends_until_free_slot = min(
            [1 - pool.free_slots for pool in self._slot_pools if pool.free_slots <= 0],
            default=count,
        )
        for end, slot, group, start, context in self._running:
            if end > step:
                if is_event:
                    break
                if plan.event_times and now > until:
                    plan.is_truncated = True
                    break
                steps, free_tokens = end - step, timing.kv_tokens - resident
                new_tokens = steps * count
                if new_tokens > free_tokens and free_tokens // count < steps:
                    steps = max(0, int(free_tokens // count))
                    plan.event_times.append(now + timing.decode_run_s(count, resident, steps))
                    plan.resident_tokens.append(resident + steps * count)
                    plan.preemption_step = step + steps
                    break
                now += timing.decode_run_s(count, resident, steps)
                resident += new_tokens
                step = end
            resident -= context + end - start
            count -= 1
            plan.event_times.append(now)
            plan.resident_tokens.append(resident)
            is_event |= (slot == group.last_slot and not group.num_waiting) or len(
                plan.event_times
            ) == ends_until_free_slot
            if waiting and not is_event:
                is_event = self._has_capacity(count, resident)
        return plan

    def _apply_events(self, count: int) -> None:
        if not count:
            return
        plan = self._plan
        assert plan is not None
        self.now, resident = plan.event_times[count - 1], plan.resident_tokens[count - 1]
        is_last = count == len(plan.event_times)
        if is_last and plan.preemption_step is not None:
            self.decode_steps = plan.preemption_step
            self._finish_rollouts(count - 1)
        else:
            self.decode_steps = self._running[count - 1][0]
            self._finish_rollouts(count)
        self.resident_tokens = resident
        if is_last:
            self._plan = None
        else:
            del plan.event_times[:count]
            del plan.resident_tokens[:count]

    def _finish_rollouts(self, count: int) -> None:
        newest, version = self._version_marks[-1]
        num_finished_before = len(self._finished_groups)
        full_pools = [pool for pool in self._slot_pools if pool.free_slots <= 0]
        for end, slot, group, start, context in self._running[:count]:
            if start >= newest:
                versions = group.tokens_by_version
                versions[version] = versions.get(version, 0) + end - start
            else:
                self._count_tokens(group, start, end)
            if self._log is not None:
                self._log.append((start, end, context))
            self.resident_tokens -= context + end - start
            group.slots.free_slots += 1
            if slot == group.last_slot and not group.num_waiting:
                self._finished_groups.append((self.now, group))
        del self._running[:count]
        if any(pool.free_slots > 0 for pool in full_pools):
            self._slots_freed_s = self.now
        delivery_s = (len(self._finished_groups) - num_finished_before) * self._timing.group_s
        if delivery_s:
            self.now += delivery_s
            self._plan = None

    def _count_tokens(self, group: RunningGroup[K], start: int, end: int) -> None:
        """Add a group's tokens of decode steps `start` to `end` to its counts by version."""
        versions = group.tokens_by_version
        for since, version in reversed(self._version_marks):
            first = max(since, start)
            if first < end:
                versions[version] = versions.get(version, 0) + end - first
                end = first
            if since <= start:
                break

    def _has_capacity(self, count: int, resident: float) -> bool:
        """Return whether the first waiting rollout can start.

        count, resident: running rollouts, and tokens in the KV cache.
        """
        timing, context = self._timing, self._waiting[0][1]
        return count < timing.max_running and resident + context + count + 1 <= timing.kv_tokens

    def _start_waiting(self) -> None:
        if self._is_paused:
            return
        waiting, running, step = self._waiting, self._running, self.decode_steps
        max_running, kv_tokens = self._timing.max_running, self._timing.kv_tokens
        count, resident = len(running), self.resident_tokens
        last_slot, prefill_tokens = self._last_slot, 0.0
        while waiting and count < max_running:
            group, context, tokens = waiting[0]
            # Inlined `_has_capacity`: a call per waiting rollout is too slow.
            if resident + context + count + 1 > kv_tokens:
                break
            waiting.popleft()
            last_slot += 1
            count += 1
            end = step + tokens
            group.num_waiting -= 1
            if end >= group.end_step:
                group.end_step, group.last_slot = end, last_slot
            rollout = end, last_slot, group, step, context
            running.append(rollout)
            self._started.append(rollout)
            resident += context
            prefill_tokens += context
        if last_slot > self._last_slot:
            running.sort()
            if len(self._started) > MAX_STARTED * len(running):
                self._started = [rollout for rollout in self._started if rollout[0] > step]
            self.resident_tokens, self._last_slot = resident, last_slot
            self.now += self._timing.prefill_token_s * prefill_tokens
            self._plan = None

    def _preempt_newest(self) -> None:
        """Preempt the newest rollouts until the KV cache has room for a token of each rollout."""
        running, kv_tokens = self._running, self._timing.kv_tokens
        while running and self.resident_tokens + len(running) > kv_tokens:
            end, slot, group, start, context = self._started.pop()
            if end <= self.decode_steps:
                continue
            del running[bisect_left(running, (end, slot), key=itemgetter(0, 1))]
            self._count_tokens(group, start, self.decode_steps)
            if self._log is not None:
                self._log.append((start, self.decode_steps, context))
            context += self.decode_steps - start
            self.resident_tokens -= context
            group.num_waiting += 1
            self._waiting.appendleft((group, context, end - self.decode_steps))
            self._plan = None


@dataclass(slots=True)
class _EventPlan:
    """Times at which running rollouts end, and the tokens in the KV cache after each end.

    preemption_step: if set, the plan ends at this decode step because the KV cache is full.
    is_truncated: further rollouts end before the next event, after the requested time.
    """

    event_times: list[float]
    resident_tokens: list[float]
    preemption_step: int | None = None
    is_truncated: bool = False


def _count_steps_until(
    timing: GeneratorTiming, count: int, resident: float, seconds: float, *, at_most: int
) -> int:
    """Return the smallest number of decode steps that takes `seconds`, at most `at_most`."""
    return bisect_left(
        range(at_most), seconds, key=lambda steps: timing.decode_run_s(count, resident, steps)
    )
