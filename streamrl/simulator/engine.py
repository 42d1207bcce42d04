"""One generator replica: rollouts sampled together, step by step, none of which is looked at alone.

Between two events (a group is done, there is room for a rollout that waits, there is none for those
that run) the time that decode steps take is a sum in closed form: the tokens in memory grow by one
per rollout and step. Times are of whoever calls, s. What comes while a step is under way has its
effect at the end of the step, which is then as far as the engine has got.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from streamrl.placement.timings import GeneratorTiming

K = TypeVar("K")


@dataclass(eq=False, slots=True)
class Sampling(Generic[K]):
    """A group under way: how many of its rollouts are left, and its tokens by version."""

    key: K
    left: int
    versions: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Rollout(Generic[K]):
    """`tokens` are to be sampled behind `context`; it runs since step `start`."""

    group: Sampling[K]
    context: float
    tokens: int
    start: int = 0


class Engine(Generic[K]):
    """Samples the rollouts of groups; each goes by a key of the caller's.

    A rollout takes a place when there is one of `max_running`, and room for all its tokens so far
    and one more of everybody. Where room runs out the newest loses its place and is the next to get
    one, its tokens computed anew.
    """

    def __init__(self, timing: GeneratorTiming) -> None:
        self._timing = timing
        self.now = 0.0
        """As far as it has got."""
        self.step = 0
        """Decode steps made."""
        self.resident = 0.0
        """Tokens in memory."""
        self.preempted = 0
        """How often a rollout has lost its place."""
        self._running: list[tuple[int, int, _Rollout[K]]] = []
        self._waiting: deque[_Rollout[K]] = deque()
        self._done: deque[tuple[float, Sampling[K]]] = deque()
        self._places = 0
        self._marks = [(0, -1)]
        self._halted = False
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
        return self._planned().times[-1] if self._running and not self._halted else math.inf

    def add(self, key: K, prompt_tokens: float, lengths: Sequence[int], now: float) -> None:
        """A group comes: sample completions of these lengths behind its prompt."""
        self._reach(now)
        group, self._plan = Sampling(key, len(lengths)), None
        self._waiting.extend(_Rollout(group, prompt_tokens, tokens) for tokens in lengths)
        self._fill()

    def advance(self, now: float) -> list[Sampling[K]]:
        """Go on until `now`; the groups that are done."""
        done: list[Sampling[K]] = []
        while self.next_s <= now:
            if not self._done:
                self._commit(len(self._planned().times))
                self._make_room()
                self._fill()
            while self._done and self._done[0][0] <= now:
                done.append(self._done.popleft()[1])
        return done

    def load(self, version: int, pause_s: float, now: float) -> float:
        """Sample from another version, after a pause; returns when it goes on."""
        self._reach(now)
        self._marks.append((self.step, version))
        self.now += pause_s
        self._plan = None
        return self.now

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
        """Tokens of groups that are not done, of rollouts that are done or run: lost if it dies."""
        groups = {id(one.group): one.group for _, _, one in self._running}
        groups |= {id(one.group): one.group for one in self._waiting}
        booked = sum(sum(group.versions.values()) for group in groups.values())
        return booked + sum(self.step - one.start for _, _, one in self._running)

    def _reach(self, now: float) -> None:
        """Come to the end of the step that is under way at `now`."""
        if self._halted:
            return
        if not self._running:
            self.now = max(self.now, now)
            return
        if self.now >= now:
            return
        plan = self._planned()
        self._commit(bisect_right(plan.times, now, hi=len(plan.times) - 1))
        if self.now < now:
            steps = self._running[0][0] - self.step
            pace = _Pace(self._timing, len(self._running), self.resident)
            made = pace.steps_until(now - self.now, at_most=steps)
            self.now += pace.seconds(made)
            self.step += made
            self.resident += made * len(self._running)
            self._end(sum(end == self.step for end, _, _ in self._running))
            self._make_room()
            self._fill()
            self._plan = None

    def _planned(self) -> "_Plan":
        if self._plan is None:
            self._plan = self._look_ahead()
        return self._plan

    def _look_ahead(self) -> "_Plan":
        """The ends of rollouts, in order, up to the first after which something else happens."""
        timing, running = self._timing, self._running
        now, step, resident, count = self.now, self.step, self.resident, len(running)
        left: dict[int, int] = {}
        plan, is_event = _Plan(), False
        for end, _, rollout in running:
            if is_event and end > step:
                break
            pace = _Pace(timing, count, resident)
            steps, room = end - step, timing.kv_tokens - resident
            if steps * count > room and int(room // count) < steps:
                steps = max(0, int(room // count))
                plan.add(now + pace.seconds(steps), step + steps, resident + steps * count)
                plan.ends_with_preemption = True
                break
            if steps:
                now += pace.seconds(steps)
                resident += steps * count
                step = end
            resident -= rollout.context + rollout.tokens
            count -= 1
            plan.add(now, step, resident)
            group = rollout.group
            remaining = left.get(id(group), group.left) - 1
            left[id(group)] = remaining
            is_event |= not remaining or bool(self._waiting and self._fits(count, resident))
        return plan

    def _commit(self, count: int) -> None:
        """Make the first so many of the planned events happen."""
        if not count:
            return
        plan = self._planned()
        self.now, self.step, resident = plan.at(count - 1)
        is_last = count == len(plan.times)
        self._end(count - (is_last and plan.ends_with_preemption))
        self.resident = resident
        if is_last:
            self._plan = None
        else:
            plan.drop(count)

    def _end(self, count: int) -> None:
        """The first so many are at their end."""
        for _, _, rollout in self._running[:count]:
            self._book(rollout, rollout.start + rollout.tokens)
            self.resident -= rollout.context + rollout.tokens
            rollout.group.left -= 1
            if not rollout.group.left:
                self._done.append((self.now, rollout.group))
        del self._running[:count]

    def _book(self, rollout: _Rollout[K], end: int) -> None:
        """Count its tokens of the steps until `end` by the version that sampled them."""
        versions = rollout.group.versions
        for since, version in reversed(self._marks):
            if since < end:
                first = max(since, rollout.start)
                versions[version] = versions.get(version, 0) + end - first
                end = first
                if end == rollout.start:
                    break

    def _fits(self, count: int, resident: float) -> bool:
        """Whether the first that waits has a place beside so many."""
        timing, context = self._timing, self._waiting[0].context
        return count < timing.max_running and resident + context + count + 1 <= timing.kv_tokens

    def _fill(self) -> None:
        """Give places to those that wait, first come, first served."""
        if self._halted:
            return
        context, before = 0.0, len(self._running)
        while self._waiting and self._fits(len(self._running), self.resident):
            rollout = self._waiting.popleft()
            rollout.start = self.step
            self._places += 1
            self._running.append((self.step + rollout.tokens, self._places, rollout))
            self.resident += rollout.context
            context += rollout.context
        if len(self._running) > before:
            self._running.sort(key=_order)
            self.now += self._timing.prefill_token_s * context
            self._plan = None

    def _make_room(self) -> None:
        """Take the places of the newest until there is room for a token of everybody."""
        while self._running and self.resident + len(self._running) > self._timing.kv_tokens:
            newest = max(range(len(self._running)), key=lambda i: self._running[i][1])
            _, _, rollout = self._running.pop(newest)
            self._book(rollout, self.step)
            made = self.step - rollout.start
            rollout.context += made
            rollout.tokens -= made
            self.resident -= rollout.context
            self._waiting.appendleft(rollout)
            self.preempted += 1
            self._plan = None


class _Plan:
    """Planned ends of rollouts: when, after which step, and the tokens in memory then."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._rest: list[tuple[int, float]] = []
        self.ends_with_preemption = False

    def add(self, time: float, step: int, resident: float) -> None:
        self.times.append(time)
        self._rest.append((step, resident))

    def at(self, index: int) -> tuple[float, int, float]:
        return self.times[index], *self._rest[index]

    def drop(self, count: int) -> None:
        del self.times[:count]
        del self._rest[:count]


class _Pace:
    """How long steps take of so many rollouts, which have so many tokens at the beginning."""

    __slots__ = ("_bound", "_each", "_first", "_grows", "_level")

    def __init__(self, timing: GeneratorTiming, count: int, resident: float) -> None:
        each = timing.step_s + timing.rollout_s * count
        level = timing.compute_rollout_s * count
        first = timing.weights_s + timing.kv_token_s * resident
        grows = timing.kv_token_s * count
        self._level, self._first, self._grows, self._each = level, first, grows, each
        # So many steps are bound by computing; those that follow, by what is to be read.
        self._bound = 0.0 if first >= level else math.inf
        if first < level and grows:
            self._bound = math.ceil((level - first) / grows)

    def seconds(self, steps: int) -> float:
        """Of so many steps."""
        bound = min(steps, self._bound)
        rest = steps - bound
        first = self._first + self._grows * bound
        return (
            steps * self._each + bound * self._level + rest * (first + self._grows * (rest - 1) / 2)
        )

    def steps_until(self, seconds: float, *, at_most: int) -> int:
        """The fewest steps that take so long, or `at_most`."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low


def _order(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[:2]
