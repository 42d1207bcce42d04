"""Device lease: the right to compute on a pool of devices that several stages share.

Stages with devices of their own get a lease that never blocks. Stages that share a device take
turns: a device is in one phase at a time (generate, score, train, ...). All holders of that phase
compute together; after the last release the device goes to the phase that has waited longest.
Phases without a common device run side by side. A phase that can be suspended, such as generation
between two tokens, is preempted at the end of its time slice if a conflicting phase waits.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Protocol

from streamrl.errors import DeadlineError

MIN_WAIT_S = 1e-3
PREEMPTION_WAIT_S = 5.0
"""Longest wait of a single `wait_for_preemption` call, s."""


class ProgressClock:
    """Time of the last progress on shared devices; an outage and moving weights count as progress.

    A waiter on a shared device may have to wait for long work of the holders. So a deadline counts
    only the time in which no holder finishes a piece of work.
    """

    def __init__(self) -> None:
        self.last_progress_at = -math.inf
        self._deadlines: dict[asyncio.Timeout, float] = {}

    def record_progress(self) -> None:
        """Record that a holder has finished a piece of work; restart the waiters' timeouts."""
        self.last_progress_at = asyncio.get_running_loop().time()
        for deadline, patience_s in self._deadlines.items():
            if not deadline.expired():
                deadline.reschedule(self.last_progress_at + patience_s)

    @asynccontextmanager
    async def progress_timeout(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Return a context like asyncio.timeout that times out after `timeout_s` without progress.

        Every recorded progress restarts the timeout; an infinite `timeout_s` disables the timeout.
        """
        is_finite = timeout_s < math.inf
        async with asyncio.timeout(timeout_s if is_finite else None) as deadline:
            if is_finite:
                self._deadlines[deadline] = timeout_s
            try:
                yield deadline
            finally:
                self._deadlines.pop(deadline, None)


class DedicatedDeviceLease:
    """Device lease of a stage with devices of its own: never blocks."""

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        yield

    def report_progress(self) -> None:
        pass


@dataclass(eq=False)
class PhaseRequest:
    """Request of a holder, which waits until a phase of work is granted the devices."""

    holder: str
    phase: str
    grant_future: "asyncio.Future[None]"


@dataclass(eq=False)
class PhaseGrant:
    """A phase that has devices now: its start, and the number of grants of each holder.

    A holder has two grants if a cancelled request was granted together with its retry.
    """

    started_at: float
    holders: Counter[str] = field(default_factory=Counter)


class DeviceArbiter:
    """Grants the devices of a pool to phases; phases with a common device exclude each other.

    timeout_s: longest wait without progress, as `progress_clock` measures it.
    slice_s: time for which a phase keeps the devices before suspendable holders are preempted;
        until then further holders may join the phase.
    slots: devices of each phase; a phase without an entry needs all devices.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        slice_s: float = 0.0,
        slots: Mapping[str, Collection[int]] | None = None,
        progress_clock: ProgressClock | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._slice_s = slice_s
        self._slots = {phase: frozenset(devices) for phase, devices in (slots or {}).items()}
        self._grants: dict[str, PhaseGrant] = {}
        self._requests: dict[PhaseRequest, None] = {}
        self._has_conflict = cache(self._share_devices)
        self._preemption_events: dict[str, asyncio.Event] = {}
        """Event that makes a holder's `wait_for_preemption` check again, by holder."""
        self._progress_clock = progress_clock or ProgressClock()

    async def acquire(self, holder: str, phase: str = "") -> None:
        """Wait until a holder may compute in `phase`, by default a phase of the holder's name.

        Raises DeadlineError naming the current holders and their times. Also returns, without a
        grant, if `remove_holder` declares this holder dead: nobody would release the grant.
        """
        request = PhaseRequest(holder, phase or holder, asyncio.get_running_loop().create_future())
        self._requests[request] = None
        self._grant_and_notify()
        try:
            if not request.grant_future.done():
                await self._wait_for_grant(request)
        finally:
            if request in self._requests:
                del self._requests[request]
                self._grant_and_notify()

    async def _wait_for_grant(self, request: PhaseRequest) -> None:
        """Wait until a request is granted; raise DeadlineError after `timeout_s` of no progress."""
        now = asyncio.get_running_loop().time
        since = now()
        try:
            async with self._progress_clock.progress_timeout(self._timeout_s):
                await asyncio.shield(request.grant_future)
        except TimeoutError:
            if request.grant_future.done():  # granted at the moment of the timeout
                return
            raise DeadlineError(
                f"{request.holder} waited {now() - since:.0f} s for the device lease;"
                f" {self._describe_conflicts(request.phase)}"
            ) from None

    async def release(self, holder: str) -> None:
        """Release one grant of a holder; grant waiting requests."""
        phase = self._find_phase(holder)
        assert phase is not None, (holder, self._grants)
        self._release_grant(phase, holder, 1)
        self._grant_and_notify()

    def report_progress(self, holder: str) -> None:
        """Extend the deadlines of all waiters: a holder has finished a piece of work."""
        self._progress_clock.record_progress()

    def remove_holder(self, holder: str) -> None:
        """Release all grants of a dead holder and drop its waiting requests."""
        for request in [request for request in self._requests if request.holder == holder]:
            del self._requests[request]
            request.grant_future.set_result(None)
        while phase := self._find_phase(holder):
            self._release_grant(phase, holder, self._grants[phase].holders[holder])
        self._grant_and_notify()

    async def wait_for_preemption(self, holder: str, wait_s: float = PREEMPTION_WAIT_S) -> bool:
        """Wait until a holder must yield its devices; return True then.

        A holder must yield once its phase has used up its time slice and a conflicting phase waits.
        Returns False after `wait_s`, or if the holder has no grant.
        """
        clock = asyncio.get_running_loop()
        deadline = clock.time() + wait_s
        while phase := self._find_phase(holder):
            now = clock.time()
            is_wanted = self._has_conflicting_request(phase)
            slice_left_s = self._grants[phase].started_at + self._slice_s - now
            if is_wanted and slice_left_s <= 0:
                return True
            if now >= deadline:
                return False
            # At least MIN_WAIT_S, so that the clock advances.
            left_s = deadline - now
            wait = max(MIN_WAIT_S, min(left_s, slice_left_s if is_wanted else left_s))
            event = self._preemption_events.setdefault(holder, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), wait)
            except TimeoutError:
                continue
        return False

    def _find_phase(self, holder: str) -> str | None:
        return next((p for p, grant in self._grants.items() if holder in grant.holders), None)

    def _share_devices(self, phase: str, other: str) -> bool:
        """Return whether two phases exclude each other."""
        devices, other_devices = self._slots.get(phase), self._slots.get(other)
        shares = devices is None or other_devices is None or bool(devices & other_devices)
        return phase != other and shares

    def _has_conflicting_request(self, phase: str) -> bool:
        return any(self._has_conflict(phase, other) for other in {r.phase for r in self._requests})

    def _release_grant(self, phase: str, holder: str, times: int) -> None:
        """Take `times` grants of a phase from a holder; a phase without holders ends."""
        self._progress_clock.record_progress()
        holders = self._grants[phase].holders
        holders[holder] -= times
        if not holders[holder]:
            del holders[holder]
            self._wake_holder(holder)
        if not holders:
            del self._grants[phase]

    def _wake_holder(self, holder: str) -> None:
        if holder in self._preemption_events:
            self._preemption_events.pop(holder).set()

    def _grant_and_notify(self) -> None:
        """Grant requests; wake `wait_for_preemption` of phases that conflict with the others."""
        self._grant_requests()
        for phase, grant in self._grants.items():
            if self._has_conflicting_request(phase):
                for holder in grant.holders:
                    self._wake_holder(holder)

    def _grant_requests(self) -> None:
        """Grant every request whose phase conflicts with no active phase and no earlier request.

        Requests for an active phase join the phase while its time slice lasts.

        Example: A and B conflict, C conflicts with neither. A is active and its slice is over.
        Requests in order B, A, C: B must wait for A; the second A must wait behind B; C is granted.
        """
        now = asyncio.get_running_loop().time()
        blocked: set[str] = set()
        for request in list(self._requests):
            phase = request.phase
            if phase in blocked:  # an earlier request of the same phase has to wait
                continue
            grant = self._grants.get(phase)
            joins = grant is not None and (
                now - grant.started_at < self._slice_s or not self._has_conflicting_request(phase)
            )
            # Check blocked phases, too: a request must not overtake earlier requests.
            if joins or not any(
                self._has_conflict(phase, other) for other in (*self._grants, *blocked)
            ):
                grant = self._grants.setdefault(phase, PhaseGrant(now))
                del self._requests[request]
                grant.holders[request.holder] += 1
                request.grant_future.set_result(None)
            else:
                blocked.add(phase)

    def _describe_conflicts(self, phase: str) -> str:
        now = asyncio.get_running_loop().time()
        conflicts = [
            f"{', '.join(sorted(grant.holders))} has held it for {now - grant.started_at:.0f} s"
            for other, grant in self._grants.items()
            if self._has_conflict(phase, other)
        ]
        return "; ".join(conflicts) or "it is reserved for holders that have waited longer"


class ArbiterProtocol(Protocol):
    """Interface of `DeviceArbiter` for a holder, which may call the arbiter through Ray."""

    async def acquire(self, holder: str, phase: str) -> None: ...

    async def release(self, holder: str) -> None: ...

    async def wait_for_preemption(self, holder: str) -> bool: ...

    def report_progress(self, holder: str) -> None: ...


class SuspendableWork(Protocol):
    """Work that can pause while a different phase uses its devices, such as generation."""

    async def suspend(self) -> None:
        """Pause the work; keep all state, so that `resume` continues the work."""
        ...

    async def resume(self) -> None: ...


class LeaseState(Enum):
    """State of a process's claim on shared devices."""

    RELEASED = "released"
    HELD = "held"
    SUSPENDING = "suspending"
    """The devices are still held; the work is pausing."""
    SUSPENDED = "suspended"
    """The devices are released; the work resumes with the next grant."""


class SharedDeviceLease:
    """Device lease of a process on devices that several stages share.

    Concurrent work of the process shares a single grant. Example: all groups of a generator belong
    to one holder, which keeps the devices until the last group is finished. With `suspendable` work
    the process can be preempted; the work then pauses until the devices are granted again.

    holder: name of the process at the arbiter.
    phase: requested phase, which other holders may share; "" means a phase of the holder's name.
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
        self._state = LeaseState.RELEASED
        self._lock = asyncio.Lock()
        """Held while devices are acquired or yielded."""
        self._preemption_watch: asyncio.Task[None] | None = None
        self._late_release: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        async with self._lock:
            if self._state is not LeaseState.HELD:
                await self._acquire_devices()
            self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            watch = self._preemption_watch
            if not self._num_users and self._state is LeaseState.HELD:
                await self._release_devices()
            else:
                self.report_progress()
        if watch is not None and watch.done() and not watch.cancelled():
            # If suspending failed, raise that error from the work that was being suspended.
            watch.result()

    def report_progress(self) -> None:
        """Report to the arbiter that a piece of work is finished, while still holding the lease."""
        self._arbiter.report_progress(self._holder)

    async def _acquire_devices(self) -> None:
        """Wait for the devices, and resume suspended work.

        If cancelled while waiting, releases the grant once it arrives.
        """
        acquiring = asyncio.ensure_future(self._arbiter.acquire(self._holder, self._phase))
        try:
            await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(self._release_late_grant)
            raise
        if self._suspendable is not None and self._state is LeaseState.SUSPENDED:
            try:
                await self._suspendable.resume()
            except BaseException:
                await self._arbiter.release(self._holder)
                raise
        self._state = LeaseState.HELD
        watch = self._preemption_watch
        if self._suspendable is not None and (watch is None or watch.done()):
            self._preemption_watch = asyncio.create_task(self._watch_preemption(self._suspendable))

    async def _release_devices(self) -> None:
        self._state = LeaseState.RELEASED
        if self._preemption_watch is not None:
            self._preemption_watch.cancel()
            self._preemption_watch = None
        await self._arbiter.release(self._holder)

    async def _watch_preemption(self, work: SuspendableWork) -> None:
        """Yield the devices at each preemption, while they are held."""
        while self._state is LeaseState.HELD:
            if not await self._arbiter.wait_for_preemption(self._holder):
                await asyncio.sleep(0)
                continue
            async with self._lock:
                if self._state is LeaseState.HELD and self._num_users:
                    await self._yield_devices(work)

    async def _yield_devices(self, work: SuspendableWork) -> None:
        """Suspend the work, release the devices, and acquire them again while work remains.

        Acquires without a deadline: otherwise nothing would resume the work, and the current
        holders of the devices have deadlines of their own.
        """
        self._state = LeaseState.SUSPENDING
        try:
            await work.suspend()
        except BaseException:
            self._state = LeaseState.HELD  # `hold` releases them with the last piece of work
            if not self._num_users:
                self._state = LeaseState.RELEASED
                await self._arbiter.release(self._holder)
            raise
        self._state = LeaseState.SUSPENDED
        await self._arbiter.release(self._holder)
        while self._num_users and self._state is LeaseState.SUSPENDED:
            with suppress(DeadlineError):
                await self._acquire_devices()
        if not self._num_users and self._state is LeaseState.HELD:
            self._state = LeaseState.RELEASED
            await self._arbiter.release(self._holder)

    def _release_late_grant(self, acquiring: "asyncio.Future[None]") -> None:
        """Release a grant that arrived after its request was cancelled."""
        if not acquiring.cancelled() and acquiring.exception() is None:
            self._late_release = asyncio.ensure_future(self._arbiter.release(self._holder))
