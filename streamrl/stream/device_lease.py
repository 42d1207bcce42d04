"""The device lease: who may compute on a pool.

Where every stage has devices of its own the lease is free. Where stages share some they take turns:
a device is in one phase at a time (generate, score, train, ...), all who work in that phase hold it
together, and it goes to the phase that has waited longest once the last of them gives it back.
Phases without a device in common go on side by side. A phase that can be suspended, as rollouts can
between two tokens, is asked to give way once another has waited and it has had its slice.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from streamrl.errors import DeadlineError

LEAST_WAIT_S = 1e-3
WANTED_S = 5.0
"""How long a holder asks at once whether the pool is wanted, s."""


class Pulse:
    """When something last moved on devices that are shared; nowhere else does it beat.

    Who waits there waits for the work of others, which may be long: what counts for a deadline is
    the time in which nobody has finished a piece of theirs.
    """

    def __init__(self) -> None:
        self.at = -math.inf
        self._deadlines: dict[asyncio.Timeout, float] = {}

    def beat(self) -> None:
        """A piece of work is done."""
        self.at = asyncio.get_running_loop().time()
        for deadline, patience_s in self._deadlines.items():
            if not deadline.expired():
                deadline.reschedule(self.at + patience_s)

    @asynccontextmanager
    async def patience(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """As asyncio.timeout, of the time in which nothing moves; none if that is infinite."""
        if timeout_s == math.inf:
            async with asyncio.timeout(None) as deadline:
                yield deadline
            return
        async with asyncio.timeout(timeout_s) as deadline:
            self._deadlines[deadline] = timeout_s
            try:
                yield deadline
            finally:
                del self._deadlines[deadline]


class FreeLease:
    """Every stage has a pool of its own: nobody waits."""

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        """Nothing to hold."""
        yield

    def progress(self) -> None:
        """Nobody waits."""


@dataclass(eq=False)
class Waiter:
    """One who waits for the pool, and what becomes true when it has it."""

    holder: str
    phase: str
    granted: "asyncio.Future[None]"


@dataclass(eq=False)
class Turn:
    """A phase that has the pool: since when, and who works in it, each how often.

    Who was cancelled while it waited may get the pool beside its next try.
    """

    since: float
    holders: Counter[str] = field(default_factory=Counter)
    is_wanted: bool = False
    """Whether others wait for it."""


class Arbiter:
    """Lends a pool to phases, those that have a device in common one at a time.

    timeout_s: longest wait in which nothing moves, as `pulse` has it. slice_s: how long a phase
    keeps the pool, at least, before those who can give way are asked to; meanwhile others may join
    it. slots: the devices of each phase; one that is not there needs all of them.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        slice_s: float = 0.0,
        slots: Mapping[str, Collection[int]] | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._slice_s = slice_s
        self._slots = {phase: frozenset(each) for phase, each in (slots or {}).items()}
        self._turns: dict[str, Turn] = {}
        self._waiting: dict[Waiter, None] = {}
        self._wanting: Counter[str] = Counter()
        """How many wait, by phase."""
        self._rivals: dict[tuple[str, str], bool] = {}
        self._asked: dict[str, asyncio.Event] = {}
        """Set for a holder that asks whether it is to give way, once it should look again."""
        self._pulse = pulse or Pulse()

    async def acquire(self, holder: str, phase: str = "") -> None:
        """Wait for the pool, for the holder's own phase if none is named.

        Raises DeadlineError naming who has it and for how long. It also ends if the holder dies
        meanwhile: then without the pool, which nobody would give back.
        """
        waiter = Waiter(holder, phase or holder, asyncio.get_running_loop().create_future())
        self._waiting[waiter] = None
        self._wanting[waiter.phase] += 1
        self._next()
        try:
            await self._granted(waiter)
        finally:
            if waiter in self._waiting:
                self._leave(waiter)
                self._tell_wanted()

    async def _granted(self, waiter: Waiter) -> None:
        now = asyncio.get_running_loop().time
        since = now()
        try:
            async with self._pulse.patience(self._timeout_s):
                await asyncio.shield(waiter.granted)
        except TimeoutError:
            if waiter.granted.done():  # at the last moment
                return
            raise DeadlineError(
                f"{waiter.holder} waited {now() - since:.0f} s for the device lease;"
                f" {self._said_of(waiter.phase)}"
            ) from None

    async def release(self, holder: str) -> None:
        """Give the pool back."""
        phase = self._phase_of(holder)
        assert phase is not None, (holder, self._turns)
        self._give_back(phase, holder, 1)
        self._next()

    def progress(self, holder: str) -> None:
        """A holder has done a piece of its work, and goes on."""
        self._pulse.beat()

    def forget(self, holder: str) -> None:
        """A holder has died: if it had the pool or is about to, the next in line has it."""
        for waiter in [waiter for waiter in self._waiting if waiter.holder == holder]:
            self._leave(waiter)
            waiter.granted.set_result(None)
        while phase := self._phase_of(holder):
            self._give_back(phase, holder, self._turns[phase].holders[holder])
        self._next()

    async def wanted(self, holder: str, wait_s: float = WANTED_S) -> bool:
        """Wait until this holder should give way, as it has had its slice and others wait.

        False if that does not come within `wait_s`, or it has not got the pool.
        """
        clock = asyncio.get_running_loop()
        until = clock.time() + wait_s
        while phase := self._phase_of(holder):
            now = clock.time()
            others = self._rivals_wait(phase)
            left_s = self._turns[phase].since + self._slice_s - now
            if others and left_s <= 0:
                return True
            if now >= until:
                return False
            # Never so short that the clock does not move on.
            wait = max(LEAST_WAIT_S, min(until - now, left_s if others else until - now))
            asked = self._asked.setdefault(holder, asyncio.Event())
            try:
                await asyncio.wait_for(asked.wait(), wait)
            except TimeoutError:
                continue
        return False

    def _phase_of(self, holder: str) -> str | None:
        return next((phase for phase, turn in self._turns.items() if holder in turn.holders), None)

    def _are_rivals(self, phase: str, other: str) -> bool:
        """Whether two phases cannot go on side by side."""
        if (phase, other) not in self._rivals:
            mine, theirs = self._slots.get(phase), self._slots.get(other)
            shares = mine is None or theirs is None or bool(mine & theirs)
            self._rivals[phase, other] = phase != other and shares
        return self._rivals[phase, other]

    def _rivals_wait(self, phase: str) -> bool:
        return any(self._are_rivals(phase, other) for other in self._wanting)

    def _leave(self, waiter: Waiter) -> None:
        """It does not wait any more."""
        del self._waiting[waiter]
        self._wanting[waiter.phase] -= 1
        if not self._wanting[waiter.phase]:
            del self._wanting[waiter.phase]

    def _give_back(self, phase: str, holder: str, times: int) -> None:
        self._pulse.beat()
        holders = self._turns[phase].holders
        holders[holder] -= times
        if not holders[holder]:
            del holders[holder]
            self._look(holder)
        if not holders:
            del self._turns[phase]

    def _look(self, holder: str) -> None:
        """Whoever asks for this holder looks again."""
        if holder in self._asked:
            self._asked.pop(holder).set()

    def _next(self) -> None:
        self._grant()
        self._tell_wanted()

    def _tell_wanted(self) -> None:
        """Have the holders of a phase look again if others wait for it now who did not before."""
        for phase, turn in self._turns.items():
            is_wanted = self._rivals_wait(phase)
            if is_wanted and not turn.is_wanted:
                for holder in turn.holders:
                    self._look(holder)
            turn.is_wanted = is_wanted

    def _grant(self) -> None:
        """Let in whom no phase stands against, neither one that has the pool nor one that waited
        longer, and those who may join a phase that has it."""
        now = asyncio.get_running_loop().time()
        before: set[str] = set()
        for waiter in list(self._waiting):
            phase = waiter.phase
            # What kept out one of its phase keeps out all who came later.
            if phase in before:
                continue
            joins = phase in self._turns and not self._is_over(phase, now)
            # Who joins late must not keep out one who has waited longer, so those count as well.
            if joins or not any(
                self._are_rivals(phase, other) for other in (*self._turns, *before)
            ):
                turn = self._turns.setdefault(phase, Turn(now))
                self._leave(waiter)
                turn.holders[waiter.holder] += 1
                waiter.granted.set_result(None)
            else:
                before.add(phase)

    def _is_over(self, phase: str, now: float) -> bool:
        """Whether nobody may join a phase any more: it had its slice, and others wait."""
        return self._rivals_wait(phase) and now - self._turns[phase].since >= self._slice_s

    def _said_of(self, phase: str) -> str:
        """Who has what a phase waits for, and for how long."""
        now = asyncio.get_running_loop().time()
        told = [
            f"{', '.join(sorted(turn.holders))} has held it for {now - turn.since:.0f} s"
            for other, turn in self._turns.items()
            if self._are_rivals(phase, other)
        ]
        return "; ".join(told) or "it is kept for others who have waited longer"


class ArbiterFace(Protocol):
    """An arbiter, here or in another process."""

    async def acquire(self, holder: str, phase: str) -> None: ...

    async def release(self, holder: str) -> None: ...

    async def wanted(self, holder: str) -> bool: ...

    def progress(self, holder: str) -> None: ...


class Suspendable(Protocol):
    """Work that can stand still while others have the pool."""

    async def suspend(self) -> None:
        """Compute nothing from now on; what was begun stays as it is."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...


class SharedLease:
    """One holder's share in an arbiter. Work of the same holder runs together under one lease.

    A generator's groups are one holder: it keeps the pool until the last of them is done, or, where
    its work is `suspendable`, until the pool is wanted; then all of it stands still until it has
    the pool again. phase: what it holds the pool for, with others of the same; its own if empty.
    """

    def __init__(
        self,
        arbiter: ArbiterFace,
        holder: str,
        phase: str = "",
        *,
        suspendable: Suspendable | None = None,
    ) -> None:
        self._arbiter = arbiter
        self._holder = holder
        self._phase = phase
        self._suspendable = suspendable
        self._users = 0
        self._turn = asyncio.Lock()
        self._has = self._stands_still = False
        self._gives_way = False
        self._watching: asyncio.Task[None] | None = None
        self._returning: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        """Hold the pool for a piece of work of `stage`."""
        async with self._turn:
            if not self._has:
                await self._acquire()
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            watching = self._watching
            if not self._users and self._has and not self._gives_way:
                await self._release()
            else:
                self.progress()
        if watching is not None and watching.done() and not watching.cancelled():
            # What giving way has failed of is the failure of the work that was to give way.
            watching.result()

    def progress(self) -> None:
        """A piece of work is done, and others wait for all of it."""
        self._arbiter.progress(self._holder)

    async def _acquire(self) -> None:
        """Take the pool. Work that is cancelled while it waits gives it back once it comes."""
        asked = asyncio.ensure_future(self._arbiter.acquire(self._holder, self._phase))
        try:
            await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._return)
            raise
        self._has = True
        if self._suspendable is None:
            return
        if self._stands_still:
            try:
                await self._suspendable.resume()
            except BaseException:
                self._has = False
                await self._arbiter.release(self._holder)
                raise
            self._stands_still = False
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(self._suspendable))

    async def _release(self) -> None:
        self._has = False
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        await self._arbiter.release(self._holder)

    async def _watch(self, work: Suspendable) -> None:
        """Give way each time the pool is wanted, as long as there is work."""
        while self._has:
            if not await self._arbiter.wanted(self._holder):
                await asyncio.sleep(0)
                continue
            async with self._turn:
                if not self._has or not self._users:
                    return
                self._gives_way = True
                try:
                    await work.suspend()
                    self._has, self._stands_still = False, True
                    await self._arbiter.release(self._holder)
                    await self._come_back()
                finally:
                    # Also if it fails: the pool goes back with the last of the work.
                    self._gives_way = False

    async def _come_back(self) -> None:
        """Take the pool again, if there still is what it was taken for.

        However long that takes: nobody would have the work go on else, and who holds the pool
        meanwhile has deadlines of its own.
        """
        while self._users and not self._has:
            with suppress(DeadlineError):
                await self._acquire()
        if self._has and not self._users:
            self._has = False
            await self._arbiter.release(self._holder)

    def _return(self, asked: "asyncio.Future[None]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._returning = asyncio.ensure_future(self._arbiter.release(self._holder))
