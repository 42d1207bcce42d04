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
from streamrl.stream.stage_worker import Places

K = TypeVar("K")


@dataclass(eq=False, slots=True)
class Sampling(Generic[K]):
    """A group under way: its tokens by version.

    Its rollouts give back `places` as they end. `waiting` are those that the engine has no place
    for; of the others `last` has the place that ends last, after step `end`.
    """

    key: K
    places: Places
    waiting: int
    versions: dict[int, int] = field(default_factory=dict)
    last: int = -1
    end: int = -1


_Running = tuple[int, int, Sampling[K], int, float]
"""A rollout with a place: its last step, the number of the place, its group, the step it runs since
and the tokens it had then. Plain tuples: there are millions of them, and they sort by themselves.
"""
_Waiting = tuple[Sampling[K], float, int]
"""One without: its group, the tokens it has, and those that are to be sampled behind them."""


class Engine(Generic[K]):
    """Samples the rollouts of groups; each goes by a key of the caller's.

    A rollout takes a place when there is one of `max_running`, and room for all its tokens so far
    and one more of everybody. Where room runs out the newest loses its place and is the next to get
    one, its tokens computed anew.
    """

    def __init__(self, timing: GeneratorTiming, kinds: Sequence[Places] = ()) -> None:
        """`advance` has something to do once one of these `kinds` has a free place again."""
        self._timing = timing
        self._kinds = kinds
        self.now = 0.0
        """As far as it has got."""
        self.step = 0
        """Decode steps made."""
        self.resident = 0.0
        """Tokens in memory."""
        self.preempted = 0
        """How often a rollout has lost its place."""
        self._running: list[_Running[K]] = []
        self._waiting: deque[_Waiting[K]] = deque()
        self._done: deque[tuple[float, Sampling[K]]] = deque()
        self._places = 0
        self._marks = [(0, -1)]
        self._halted = False
        self._freed_s = math.inf
        """When a kind had a free place again, of which `advance` has not told yet."""
        self._plan: _Plan | None = None

    @property
    def version(self) -> int:
        """The version it samples from."""
        return self._marks[-1][1]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to sample."""
        return not self._running and not self._waiting and not self._done

    @property
    def is_busy(self) -> bool:
        """Whether it samples."""
        return not self._halted and not self.is_empty

    @property
    def running(self) -> int:
        """Rollouts that have a place."""
        return len(self._running)

    @property
    def next_s(self) -> float:
        """When `advance` has something to do; infinite if never."""
        if self._done:
            return self._done[0][0]
        if self._freed_s < math.inf:
            return self._freed_s
        return self._planned().times[-1] if self._running and not self._halted else math.inf

    def acts_by(self, until: float) -> bool:
        """Whether `next_s` is no later than this; it looks no further ahead."""
        if self._done or self._freed_s < math.inf:
            return self.next_s <= until
        if not self._running or self._halted:
            return False
        return self._planned(until).times[-1] <= until

    def take(self, places: Places, count: int) -> None:
        """So many places are had by a group, which comes now or later."""
        places.free -= count
        if places.free <= 0:
            self._plan = None

    def add(
        self,
        key: K,
        prompt_tokens: float,
        lengths: Sequence[int],
        now: float,
        places: Places | None = None,
    ) -> None:
        """A group comes: sample completions of these lengths behind its prompt.

        They have `places`, which are given back one by one.
        """
        self._reach(now)
        group, self._plan = Sampling(key, places or Places(0), len(lengths)), None
        self._waiting.extend([(group, prompt_tokens, tokens) for tokens in lengths])
        self._fill()

    def advance(self, now: float) -> list[Sampling[K]]:
        """Go on until `now`; the groups that are done."""
        done: list[Sampling[K]] = []
        while self.next_s <= now:
            if not self._done and self._freed_s == math.inf:
                self._commit(len(self._planned().times))
                self._make_room()
                self._fill()
            self._freed_s = math.inf
            while self._done and self._done[0][0] <= now:
                done.append(self._done.popleft()[1])
        return done

    def load(self, version: int, pause_s: float, now: float) -> float:
        """Sample from another version, after a pause; returns when it has taken it up.

        What runs may be computed anew before it goes on.
        """
        self._reach(now)
        self._marks.append((self.step, version))
        until = self.now + pause_s
        self.now = until + self._timing.recompute_token_s * self.resident
        self._plan = None
        return until

    def halt(self, now: float) -> float:
        """Stand still at the end of the step; returns when that is."""
        self._reach(now)
        self._halted = True
        return self.now

    def go_on(self, now: float) -> None:
        """Sample again."""
        self.now = max(self.now, now)
        self._halted, self._plan = False, None
        self._fill()

    def sampled(self) -> int:
        """Tokens of groups that are not done: what is lost if it dies."""
        groups = {id(group): group for _, _, group, _, _ in self._running}
        groups |= {id(group): group for group, _, _ in self._waiting}
        booked = sum(sum(group.versions.values()) for group in groups.values())
        return booked + sum(self.step - start for _, _, _, start, _ in self._running)

    def _reach(self, now: float) -> None:
        """Come to the end of the step that is under way at `now`."""
        if self._halted:
            return
        if not self._running:
            self.now = max(self.now, now)
            return
        if self.now >= now:
            return
        plan = self._planned(now)
        self._commit(bisect_right(plan.times, now, hi=len(plan.times) - 1))
        if self.now < now:
            steps = self._running[0][0] - self.step
            timing, count, resident = self._timing, len(self._running), self.resident
            made = _steps_until(timing, count, resident, now - self.now, at_most=steps)
            self.now += timing.decoding_s(count, resident, made)
            self.step += made
            self.resident += made * len(self._running)
            self._end(bisect_right(self._running, self.step, key=itemgetter(0)))
            self._make_room()
            self._fill()
            self._plan = None

    def _planned(self, until: float = math.inf) -> "_Plan":
        plan = self._plan
        if plan is None or (plan.is_cut and plan.times[-1] <= until):
            plan = self._plan = self._look_ahead(until)
        return plan

    def _look_ahead(self, until: float) -> "_Plan":
        """The ends of rollouts, up to the first after which something else happens or `until`."""
        timing, waiting = self._timing, self._waiting
        now, step, resident, count = self.now, self.step, self.resident, len(self._running)
        plan, is_event = _Plan([], []), False
        wanted = min([1 - kind.free for kind in self._kinds if kind.free <= 0], default=count)
        for end, place, group, start, context in self._running:
            if end > step:
                if is_event:
                    break
                if plan.times and now > until:
                    plan.is_cut = True
                    break
                steps, room = end - step, timing.kv_tokens - resident
                grown = steps * count
                if grown > room and room // count < steps:
                    steps = max(0, int(room // count))
                    plan.times.append(now + timing.decoding_s(count, resident, steps))
                    plan.residents.append(resident + steps * count)
                    plan.preempts_after = step + steps
                    break
                now += timing.decoding_s(count, resident, steps)
                resident += grown
                step = end
            resident -= context + end - start
            count -= 1
            plan.times.append(now)
            plan.residents.append(resident)
            is_event |= (place == group.last and not group.waiting) or len(plan.times) == wanted
            if waiting and not is_event:
                is_event = self._fits(count, resident)
        return plan

    def _commit(self, count: int) -> None:
        """Make the first so many of the planned events happen."""
        if not count:
            return
        plan = self._plan
        assert plan is not None
        self.now, resident = plan.times[count - 1], plan.residents[count - 1]
        is_last = count == len(plan.times)
        if is_last and plan.preempts_after is not None:
            self.step = plan.preempts_after
            self._end(count - 1)
        else:
            self.step = self._running[count - 1][0]
            self._end(count)
        self.resident = resident
        if is_last:
            self._plan = None
        else:
            del plan.times[:count]
            del plan.residents[:count]

    def _end(self, count: int) -> None:
        """The first so many are at their end."""
        newest, version = self._marks[-1]
        ended = len(self._done)
        full = [kind for kind in self._kinds if kind.free <= 0]
        for end, place, group, start, context in self._running[:count]:
            if start >= newest:
                versions = group.versions
                versions[version] = versions.get(version, 0) + end - start
            else:
                self._book(group, start, end)
            self.resident -= context + end - start
            group.places.free += 1
            if place == group.last and not group.waiting:
                self._done.append((self.now, group))
        del self._running[:count]
        if any(kind.free > 0 for kind in full):
            self._freed_s = self.now
        handing_s = (len(self._done) - ended) * self._timing.group_s
        if handing_s:
            self.now += handing_s
            self._plan = None

    def _book(self, group: Sampling[K], start: int, end: int) -> None:
        """Count the tokens of these steps by the version that sampled them."""
        versions = group.versions
        for since, version in reversed(self._marks):
            first = max(since, start)
            if first < end:
                versions[version] = versions.get(version, 0) + end - first
                end = first
            if since <= start:
                break

    def _fits(self, count: int, resident: float) -> bool:
        """Whether the first that waits has a place beside so many."""
        timing, context = self._timing, self._waiting[0][1]
        return count < timing.max_running and resident + context + count + 1 <= timing.kv_tokens

    def _fill(self) -> None:
        """Give places to those that wait, first come, first served."""
        if self._halted:
            return
        waiting, running, step = self._waiting, self._running, self.step
        most, room = self._timing.max_running, self._timing.kv_tokens
        count, resident, places, computed = len(running), self.resident, self._places, 0.0
        while waiting and count < most:
            group, context, tokens = waiting[0]
            # As `_fits` has it, which is too slow for every one.
            if resident + context + count + 1 > room:
                break
            waiting.popleft()
            places += 1
            count += 1
            end = step + tokens
            group.waiting -= 1
            if end >= group.end:
                group.end, group.last = end, places
            running.append((end, places, group, step, context))
            resident += context
            computed += context
        if places > self._places:
            running.sort()
            self.resident, self._places = resident, places
            self.now += self._timing.prefill_token_s * computed
            self._plan = None

    def _make_room(self) -> None:
        """Take the places of the newest until there is room for a token of everybody."""
        running, room = self._running, self._timing.kv_tokens
        while running and self.resident + len(running) > room:
            newest = max(running, key=itemgetter(1))
            running.remove(newest)
            end, _, group, start, context = newest
            self._book(group, start, self.step)
            context += self.step - start
            self.resident -= context
            group.waiting += 1
            self._waiting.appendleft((group, context, end - self.step))
            self.preempted += 1
            self._plan = None


@dataclass(slots=True)
class _Plan:
    """When the next rollouts end, and the tokens in memory then.

    The last event is that room runs out if it `preempts_after` a step.
    """

    times: list[float]
    residents: list[float]
    preempts_after: int | None = None
    is_cut: bool = False
    """Whether more ends would follow before the last event, later than was asked."""


def _steps_until(
    timing: GeneratorTiming, count: int, resident: float, seconds: float, *, at_most: int
) -> int:
    """The fewest steps that take so long, or `at_most`."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high) // 2
        if timing.decoding_s(count, resident, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low
