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

MIN_WAIT_S = 1e-3
PREEMPTION_WAIT_S = 5.0
"""How long a holder asks at once whether the pool is wanted, s."""


class ProgressClock:
    """When something last moved on devices that are shared; nowhere else does it beat.

    Who waits there waits for the work of others, which may be long: what counts for a deadline is
    the time in which nobody has finished a piece of theirs.
    """

    def __init__(self) -> None:
        self.last_progress_at = -math.inf
        self._deadlines: dict[asyncio.Timeout, float] = {}

    def record_progress(self) -> None:
        """A piece of work is done."""
        self.last_progress_at = asyncio.get_running_loop().time()
        for deadline, patience_s in self._deadlines.items():
            if not deadline.expired():
                deadline.reschedule(self.last_progress_at + patience_s)

    @asynccontextmanager
    async def progress_timeout(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
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


class DedicatedDeviceLease:
    """Every stage has a pool of its own: nobody waits."""

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        """Nothing to hold."""
        yield

    def report_progress(self) -> None:
        """Nobody waits."""


@dataclass(eq=False)
class PhaseRequest:
    """One who waits for the pool, and what becomes true when it has it."""

    holder: str
    phase: str
    grant_future: "asyncio.Future[None]"


@dataclass(eq=False)
class PhaseGrant:
    """A phase that has the pool: since when, and who works in it, each how often.

    Who was cancelled while it waited may get the pool beside its next try.
    """

    started_at: float
    holders: Counter[str] = field(default_factory=Counter)
    has_waiters: bool = False
    """Whether others wait for it."""


class DeviceArbiter:
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
        pulse: ProgressClock | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._slice_s = slice_s
        self._slots = {phase: frozenset(each) for phase, each in (slots or {}).items()}
        self._grants: dict[str, PhaseGrant] = {}
        self._requests: dict[PhaseRequest, None] = {}
        self._num_waiting: Counter[str] = Counter()
        """How many wait, by phase."""
        self._conflicts: dict[tuple[str, str], bool] = {}
        self._preemption_events: dict[str, asyncio.Event] = {}
        """Set for a holder that asks whether it is to give way, once it should look again."""
        self._progress_clock = pulse or ProgressClock()

    async def acquire(self, holder: str, phase: str = "") -> None:
        """Wait for the pool, for the holder's own phase if none is named.

        Raises DeadlineError naming who has it and for how long. It also ends if the holder dies
        meanwhile: then without the pool, which nobody would give back.
        """
        waiter = PhaseRequest(holder, phase or holder, asyncio.get_running_loop().create_future())
        self._requests[waiter] = None
        self._num_waiting[waiter.phase] += 1
        self._grant_and_notify()
        try:
            await self._wait_for_grant(waiter)
        finally:
            if waiter in self._requests:
                self._remove_request(waiter)
                self._notify_holders()

    async def _wait_for_grant(self, waiter: PhaseRequest) -> None:
        now = asyncio.get_running_loop().time
        since = now()
        try:
            async with self._progress_clock.progress_timeout(self._timeout_s):
                await asyncio.shield(waiter.grant_future)
        except TimeoutError:
            if waiter.grant_future.done():  # at the last moment
                return
            raise DeadlineError(
                f"{waiter.holder} waited {now() - since:.0f} s for the device lease;"
                f" {self._describe_conflicts(waiter.phase)}"
            ) from None

    async def release(self, holder: str) -> None:
        """Give the pool back."""
        phase = self._find_phase(holder)
        assert phase is not None, (holder, self._grants)
        self._release_grant(phase, holder, 1)
        self._grant_and_notify()

    def report_progress(self, holder: str) -> None:
        """A holder has done a piece of its work, and goes on."""
        self._progress_clock.record_progress()

    def remove_holder(self, holder: str) -> None:
        """A holder has died: if it had the pool or is about to, the next in line has it."""
        for waiter in [waiter for waiter in self._requests if waiter.holder == holder]:
            self._remove_request(waiter)
            waiter.grant_future.set_result(None)
        while phase := self._find_phase(holder):
            self._release_grant(phase, holder, self._grants[phase].holders[holder])
        self._grant_and_notify()

    async def wait_for_preemption(self, holder: str, wait_s: float = PREEMPTION_WAIT_S) -> bool:
        """Wait until this holder should give way, as it has had its slice and others wait.

        False if that does not come within `wait_s`, or it has not got the pool.
        """
        clock = asyncio.get_running_loop()
        until = clock.time() + wait_s
        while phase := self._find_phase(holder):
            now = clock.time()
            others = self._has_conflicting_request(phase)
            left_s = self._grants[phase].started_at + self._slice_s - now
            if others and left_s <= 0:
                return True
            if now >= until:
                return False
            # Never so short that the clock does not move on.
            wait = max(MIN_WAIT_S, min(until - now, left_s if others else until - now))
            asked = self._preemption_events.setdefault(holder, asyncio.Event())
            try:
                await asyncio.wait_for(asked.wait(), wait)
            except TimeoutError:
                continue
        return False

    def _find_phase(self, holder: str) -> str | None:
        return next((phase for phase, turn in self._grants.items() if holder in turn.holders), None)

    def _has_conflict(self, phase: str, other: str) -> bool:
        """Whether two phases cannot go on side by side."""
        if (phase, other) not in self._conflicts:
            mine, theirs = self._slots.get(phase), self._slots.get(other)
            shares = mine is None or theirs is None or bool(mine & theirs)
            self._conflicts[phase, other] = phase != other and shares
        return self._conflicts[phase, other]

    def _has_conflicting_request(self, phase: str) -> bool:
        return any(self._has_conflict(phase, other) for other in self._num_waiting)

    def _remove_request(self, waiter: PhaseRequest) -> None:
        """It does not wait any more."""
        del self._requests[waiter]
        self._num_waiting[waiter.phase] -= 1
        if not self._num_waiting[waiter.phase]:
            del self._num_waiting[waiter.phase]

    def _release_grant(self, phase: str, holder: str, times: int) -> None:
        self._progress_clock.record_progress()
        holders = self._grants[phase].holders
        holders[holder] -= times
        if not holders[holder]:
            del holders[holder]
            self._wake_holder(holder)
        if not holders:
            del self._grants[phase]

    def _wake_holder(self, holder: str) -> None:
        """Whoever asks for this holder looks again."""
        if holder in self._preemption_events:
            self._preemption_events.pop(holder).set()

    def _grant_and_notify(self) -> None:
        self._grant_requests()
        self._notify_holders()

    def _notify_holders(self) -> None:
        """Have the holders of a phase look again if others wait for it now who did not before."""
        for phase, turn in self._grants.items():
            is_wanted = self._has_conflicting_request(phase)
            if is_wanted and not turn.has_waiters:
                for holder in turn.holders:
                    self._wake_holder(holder)
            turn.has_waiters = is_wanted

    def _grant_requests(self) -> None:
        """Let in whom no phase stands against, neither one that has the pool nor one that waited
        longer, and those who may join a phase that has it."""
        now = asyncio.get_running_loop().time()
        before: set[str] = set()
        for waiter in list(self._requests):
            phase = waiter.phase
            # What kept out one of its phase keeps out all who came later.
            if phase in before:
                continue
            joins = phase in self._grants and not self._is_slice_over(phase, now)
            # Who joins late must not keep out one who has waited longer, so those count as well.
            if joins or not any(
                self._has_conflict(phase, other) for other in (*self._grants, *before)
            ):
                turn = self._grants.setdefault(phase, PhaseGrant(now))
                self._remove_request(waiter)
                turn.holders[waiter.holder] += 1
                waiter.grant_future.set_result(None)
            else:
                before.add(phase)

    def _is_slice_over(self, phase: str, now: float) -> bool:
        """Whether nobody may join a phase any more: it had its slice, and others wait."""
        return (
            self._has_conflicting_request(phase)
            and now - self._grants[phase].started_at >= self._slice_s
        )

    def _describe_conflicts(self, phase: str) -> str:
        """Who has what a phase waits for, and for how long."""
        now = asyncio.get_running_loop().time()
        told = [
            f"{', '.join(sorted(turn.holders))} has held it for {now - turn.started_at:.0f} s"
            for other, turn in self._grants.items()
            if self._has_conflict(phase, other)
        ]
        return "; ".join(told) or "it is kept for others who have waited longer"


class ArbiterProtocol(Protocol):
    """An arbiter, here or in another process."""

    async def acquire(self, holder: str, phase: str) -> None: ...

    async def release(self, holder: str) -> None: ...

    async def wait_for_preemption(self, holder: str) -> bool: ...

    def report_progress(self, holder: str) -> None: ...


class SuspendableWork(Protocol):
    """Work that can stand still while others have the pool."""

    async def suspend(self) -> None:
        """Compute nothing from now on; what was begun stays as it is."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...


class SharedDeviceLease:
    """One holder's share in an arbiter. Work of the same holder runs together under one lease.

    A generator's groups are one holder: it keeps the pool until the last of them is done, or, where
    its work is `suspendable`, until the pool is wanted; then all of it stands still until it has
    the pool again. phase: what it holds the pool for, with others of the same; its own if empty.
    """

    def __init__(
        self,
        arbiter: ArbiterProtocol,
        holder: str,
        phase: str = "",
        *,
        suspendable: SuspendableWork | None = None,
    ) -> None:
        self._arbiter = arbiter
        self._holder = holder
        self._phase = phase
        self._suspendable = suspendable
        self._num_users = 0
        self._lock = asyncio.Lock()
        self._is_held = self._is_suspended = False
        self._is_yielding = False
        self._preemption_task: asyncio.Task[None] | None = None
        self._release_task: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        """Hold the pool for a piece of work of `stage`."""
        async with self._lock:
            if not self._is_held:
                await self._acquire_pool()
            self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            watching = self._preemption_task
            if not self._num_users and self._is_held and not self._is_yielding:
                await self._release_pool()
            else:
                self.report_progress()
        if watching is not None and watching.done() and not watching.cancelled():
            # What giving way has failed of is the failure of the work that was to give way.
            watching.result()

    def report_progress(self) -> None:
        """A piece of work is done, and others wait for all of it."""
        self._arbiter.report_progress(self._holder)

    async def _acquire_pool(self) -> None:
        """Take the pool. Work that is cancelled while it waits gives it back once it comes."""
        asked = asyncio.ensure_future(self._arbiter.acquire(self._holder, self._phase))
        try:
            await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._release_late_grant)
            raise
        self._is_held = True
        if self._suspendable is None:
            return
        if self._is_suspended:
            try:
                await self._suspendable.resume()
            except BaseException:
                self._is_held = False
                await self._arbiter.release(self._holder)
                raise
            self._is_suspended = False
        if self._preemption_task is None or self._preemption_task.done():
            self._preemption_task = asyncio.create_task(self._watch_preemption(self._suspendable))

    async def _release_pool(self) -> None:
        self._is_held = False
        if self._preemption_task is not None:
            self._preemption_task.cancel()
            self._preemption_task = None
        await self._arbiter.release(self._holder)

    async def _watch_preemption(self, work: SuspendableWork) -> None:
        """Give way each time the pool is wanted, as long as there is work."""
        while self._is_held:
            if not await self._arbiter.wait_for_preemption(self._holder):
                await asyncio.sleep(0)
                continue
            async with self._lock:
                if not self._is_held or not self._num_users:
                    return
                self._is_yielding = True
                try:
                    await work.suspend()
                    self._is_held, self._is_suspended = False, True
                    await self._arbiter.release(self._holder)
                    await self._reacquire_pool()
                finally:
                    # Also if it fails: the pool goes back with the last of the work.
                    self._is_yielding = False

    async def _reacquire_pool(self) -> None:
        """Take the pool again, if there still is what it was taken for.

        However long that takes: nobody would have the work go on else, and who holds the pool
        meanwhile has deadlines of its own.
        """
        while self._num_users and not self._is_held:
            with suppress(DeadlineError):
                await self._acquire_pool()
        if self._is_held and not self._num_users:
            self._is_held = False
            await self._arbiter.release(self._holder)

    def _release_late_grant(self, asked: "asyncio.Future[None]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._release_task = asyncio.ensure_future(self._arbiter.release(self._holder))
