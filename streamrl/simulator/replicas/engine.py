"""One generator replica: rollouts sampled together, step by step, none of which is looked at alone.

Between two events (a group is done or may come, there is room for a rollout that waits, there is
none for those that run) the time that decode steps take is a sum in closed form: the tokens in
memory grow by one per rollout and step. Times are of whoever calls, s. What comes while a step is
under way has its effect at the end of the step, which is then as far as the engine has got. Groups
are done when their last step is; to hand them on delays the next one.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, TypeVar

from streamrl.placement.stage_timings import GeneratorTiming
from streamrl.stream.stage_worker import ConcurrencyLimit

K = TypeVar("K")


@dataclass(eq=False, slots=True)
class RunningGroup(Generic[K]):
    """A group under way: its tokens by version.

    Its rollouts give back `places` as they end. `num_waiting` are those that the engine has no
    place for; of the others `last` has the place that ends last, after step `end`.
    """

    key: K
    slots: ConcurrencyLimit
    num_waiting: int
    tokens_by_version: dict[int, int] = field(default_factory=dict)
    last_slot: int = -1
    end_step: int = -1


_RunningRollout = tuple[int, int, RunningGroup[K], int, float]
"""A rollout with a place: its last step, the number of the place, its group, the step it runs since
and the tokens it had then. Plain tuples: there are millions of them, and they sort by themselves.
"""
_WaitingRollout = tuple[RunningGroup[K], float, int]
"""One without: its group, the tokens it has, and those that are to be sampled behind them."""


class SimulatedEngine(Generic[K]):
    """Samples the rollouts of groups; each goes by a key of the caller's.

    A rollout takes a place when there is one of `max_running`, and room for all its tokens so far
    and one more of everybody. Where room runs out the newest loses its place and is the next to get
    one, its tokens computed anew.
    """

    def __init__(self, timing: GeneratorTiming, kinds: Sequence[ConcurrencyLimit] = ()) -> None:
        """`advance` has something to do once one of these `kinds` has a free place again."""
        self._timing = timing
        self._slot_pools = kinds
        self.now = 0.0
        """As far as it has got."""
        self.decode_steps = 0
        """Decode steps made."""
        self.resident_tokens = 0.0
        """Tokens in memory."""
        self.num_preempted = 0
        """How often a rollout has lost its place."""
        self._running: list[_RunningRollout[K]] = []
        self._waiting: deque[_WaitingRollout[K]] = deque()
        self._finished_groups: deque[tuple[float, RunningGroup[K]]] = deque()
        self._last_slot = 0
        self._version_marks = [(0, -1)]
        self._is_paused = False
        self._slots_freed_s = math.inf
        """When a kind had a free place again, of which `advance` has not told yet."""
        self._plan: _EventPlan | None = None

    @property
    def version(self) -> int:
        """The version it samples from."""
        return self._version_marks[-1][1]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to sample."""
        return not self._running and not self._waiting and not self._finished_groups

    @property
    def is_busy(self) -> bool:
        """Whether it samples."""
        return not self._is_paused and not self.is_empty

    @property
    def num_running(self) -> int:
        """Rollouts that have a place."""
        return len(self._running)

    @property
    def next_event_s(self) -> float:
        """When `advance` has something to do; infinite if never."""
        if self._finished_groups:
            return self._finished_groups[0][0]
        if self._slots_freed_s < math.inf:
            return self._slots_freed_s
        return (
            self._get_plan().event_times[-1] if self._running and not self._is_paused else math.inf
        )

    def has_event_by(self, until: float) -> bool:
        """Whether `next_event_s` is no later than this; it looks no further ahead."""
        if self._finished_groups or self._slots_freed_s < math.inf:
            return self.next_event_s <= until
        if not self._running or self._is_paused:
            return False
        return self._get_plan(until).event_times[-1] <= until

    def reserve_slots(self, places: ConcurrencyLimit, count: int) -> None:
        """So many places are had by a group, which comes now or later."""
        places.free_slots -= count
        if places.free_slots <= 0:
            self._plan = None

    def add_group(
        self,
        key: K,
        prompt_tokens: float,
        lengths: Sequence[int],
        now: float,
        places: ConcurrencyLimit | None = None,
    ) -> None:
        """A group comes: sample completions of these lengths behind its prompt.

        They have `places`, which are given back one by one.
        """
        self._finish_current_step(now)
        group, self._plan = RunningGroup(key, places or ConcurrencyLimit(0), len(lengths)), None
        self._waiting.extend([(group, prompt_tokens, tokens) for tokens in lengths])
        self._start_waiting()

    def advance_to(self, now: float) -> list[RunningGroup[K]]:
        """Go on until `now`; the groups that are done."""
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
        """Sample from another version, after a pause; returns when it has taken it up.

        What runs may be computed anew before it goes on.
        """
        self._finish_current_step(now)
        self._version_marks.append((self.decode_steps, version))
        until = self.now + pause_s
        self.now = until + self._timing.recompute_token_s * self.resident_tokens
        self._plan = None
        return until

    def pause(self, now: float) -> float:
        """Stand still at the end of the step; returns when that is."""
        self._finish_current_step(now)
        self._is_paused = True
        return self.now

    def resume(self, now: float) -> None:
        """Sample again."""
        self.now = max(self.now, now)
        self._is_paused, self._plan = False, None
        self._start_waiting()

    def count_sampled_tokens(self) -> int:
        """Tokens of groups that are not done: what is lost if it dies."""
        groups = {id(group): group for _, _, group, _, _ in self._running}
        groups |= {id(group): group for group, _, _ in self._waiting}
        booked = sum(sum(group.tokens_by_version.values()) for group in groups.values())
        return booked + sum(self.decode_steps - start for _, _, _, start, _ in self._running)

    def _finish_current_step(self, now: float) -> None:
        """Come to the end of the step that is under way at `now`."""
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
            made = _count_steps_until(timing, count, resident, now - self.now, at_most=steps)
            self.now += timing.decode_run_s(count, resident, made)
            self.decode_steps += made
            self.resident_tokens += made * len(self._running)
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
        """The ends of rollouts, up to the first after which something else happens or `until`."""
        timing, waiting = self._timing, self._waiting
        now, step, resident, count = (
            self.now,
            self.decode_steps,
            self.resident_tokens,
            len(self._running),
        )
        plan, is_event = _EventPlan([], []), False
        wanted = min(
            [1 - kind.free_slots for kind in self._slot_pools if kind.free_slots <= 0],
            default=count,
        )
        for end, place, group, start, context in self._running:
            if end > step:
                if is_event:
                    break
                if plan.event_times and now > until:
                    plan.is_truncated = True
                    break
                steps, room = end - step, timing.kv_tokens - resident
                grown = steps * count
                if grown > room and room // count < steps:
                    steps = max(0, int(room // count))
                    plan.event_times.append(now + timing.decode_run_s(count, resident, steps))
                    plan.resident_tokens.append(resident + steps * count)
                    plan.preemption_step = step + steps
                    break
                now += timing.decode_run_s(count, resident, steps)
                resident += grown
                step = end
            resident -= context + end - start
            count -= 1
            plan.event_times.append(now)
            plan.resident_tokens.append(resident)
            is_event |= (place == group.last_slot and not group.num_waiting) or len(
                plan.event_times
            ) == wanted
            if waiting and not is_event:
                is_event = self._has_capacity(count, resident)
        return plan

    def _apply_events(self, count: int) -> None:
        """Make the first so many of the planned events happen."""
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
        """The first so many are at their end."""
        newest, version = self._version_marks[-1]
        ended = len(self._finished_groups)
        full = [kind for kind in self._slot_pools if kind.free_slots <= 0]
        for end, place, group, start, context in self._running[:count]:
            if start >= newest:
                versions = group.tokens_by_version
                versions[version] = versions.get(version, 0) + end - start
            else:
                self._count_tokens(group, start, end)
            self.resident_tokens -= context + end - start
            group.slots.free_slots += 1
            if place == group.last_slot and not group.num_waiting:
                self._finished_groups.append((self.now, group))
        del self._running[:count]
        if any(kind.free_slots > 0 for kind in full):
            self._slots_freed_s = self.now
        handing_s = (len(self._finished_groups) - ended) * self._timing.group_s
        if handing_s:
            self.now += handing_s
            self._plan = None

    def _count_tokens(self, group: RunningGroup[K], start: int, end: int) -> None:
        """Count the tokens of these steps by the version that sampled them."""
        versions = group.tokens_by_version
        for since, version in reversed(self._version_marks):
            first = max(since, start)
            if first < end:
                versions[version] = versions.get(version, 0) + end - first
                end = first
            if since <= start:
                break

    def _has_capacity(self, count: int, resident: float) -> bool:
        """Whether the first that waits has a place beside so many."""
        timing, context = self._timing, self._waiting[0][1]
        return count < timing.max_running and resident + context + count + 1 <= timing.kv_tokens

    def _start_waiting(self) -> None:
        """Give places to those that wait, first come, first served."""
        if self._is_paused:
            return
        waiting, running, step = self._waiting, self._running, self.decode_steps
        most, room = self._timing.max_running, self._timing.kv_tokens
        count, resident, places, computed = len(running), self.resident_tokens, self._last_slot, 0.0
        while waiting and count < most:
            group, context, tokens = waiting[0]
            # As `_fits` has it, which is too slow for every one.
            if resident + context + count + 1 > room:
                break
            waiting.popleft()
            places += 1
            count += 1
            end = step + tokens
            group.num_waiting -= 1
            if end >= group.end_step:
                group.end_step, group.last_slot = end, places
            running.append((end, places, group, step, context))
            resident += context
            computed += context
        if places > self._last_slot:
            running.sort()
            self.resident_tokens, self._last_slot = resident, places
            self.now += self._timing.prefill_token_s * computed
            self._plan = None

    def _preempt_newest(self) -> None:
        """Take the places of the newest until there is room for a token of everybody."""
        running, room = self._running, self._timing.kv_tokens
        while running and self.resident_tokens + len(running) > room:
            newest = max(running, key=itemgetter(1))
            running.remove(newest)
            end, _, group, start, context = newest
            self._count_tokens(group, start, self.decode_steps)
            context += self.decode_steps - start
            self.resident_tokens -= context
            group.num_waiting += 1
            self._waiting.appendleft((group, context, end - self.decode_steps))
            self.num_preempted += 1
            self._plan = None


@dataclass(slots=True)
class _EventPlan:
    """When the next rollouts end, and the tokens in memory then.

    The last event is that room runs out if it `preemption_step` a step.
    """

    event_times: list[float]
    resident_tokens: list[float]
    preemption_step: int | None = None
    is_truncated: bool = False
    """Whether more ends would follow before the last event, later than was asked."""


def _count_steps_until(
    timing: GeneratorTiming, count: int, resident: float, seconds: float, *, at_most: int
) -> int:
    """The fewest steps that take so long, or `at_most`."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high) // 2
        if timing.decode_run_s(count, resident, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low
