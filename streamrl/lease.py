"""The device lease: who may compute on a pool. Free, or one stage at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from streamrl.errors import DeadlineError


class FreeLease:
    """Every stage has a pool of its own: nobody waits."""

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        """Nothing to hold."""
        yield


class Arbiter:
    """Lends one pool to one holder at a time, first come, first served."""

    def __init__(self, *, timeout_s: float) -> None:
        self._lock = asyncio.Lock()
        self._timeout_s = timeout_s
        self._holder = ""
        self._since = 0.0
        self._deaths: Counter[str] = Counter()

    async def acquire(self, holder: str) -> None:
        """Wait for the pool. Raises DeadlineError naming who has it and for how long."""
        deaths = self._deaths[holder]
        try:
            await asyncio.wait_for(self._lock.acquire(), self._timeout_s)
        except TimeoutError:
            held_s = asyncio.get_running_loop().time() - self._since
            raise DeadlineError(
                f"{holder} waited {self._timeout_s:g} s for the device lease;"
                f" {self._holder} has held it for {held_s:.0f} s"
            ) from None
        if self._deaths[holder] != deaths:
            # It died while it waited; nobody would give the pool back.
            self._lock.release()
            return
        self._holder, self._since = holder, asyncio.get_running_loop().time()

    def forget(self, holder: str) -> None:
        """A holder has died: if it had the pool or is about to, the next in line has it."""
        self._deaths[holder] += 1
        if self._holder == holder:
            self._holder = ""
            self._lock.release()

    async def release(self, holder: str) -> None:
        """Give the pool back."""
        assert self._holder == holder, (self._holder, holder)
        self._holder = ""
        self._lock.release()


class ArbiterFace(Protocol):
    """An arbiter, here or in another process."""

    async def acquire(self, holder: str) -> None: ...

    async def release(self, holder: str) -> None: ...


class SharedLease:
    """One holder's share in an arbiter. Work of the same holder runs together under one lease.

    A generator's groups are one holder: it keeps the pool until the last of them is done.
    """

    def __init__(self, arbiter: ArbiterFace, holder: str) -> None:
        self._arbiter = arbiter
        self._holder = holder
        self._users = 0
        self._turn = asyncio.Lock()
        self._returning: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def hold(self, stage: str) -> AsyncIterator[None]:
        """Hold the pool for a piece of work of `stage`."""
        async with self._turn:
            if not self._users:
                await self._acquire()
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                await self._arbiter.release(self._holder)

    async def _acquire(self) -> None:
        """Take the pool. Work that is cancelled while it waits gives it back once it comes."""
        asked = asyncio.ensure_future(self._arbiter.acquire(self._holder))
        try:
            await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._return)
            raise

    def _return(self, asked: "asyncio.Future[None]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._returning = asyncio.ensure_future(self._arbiter.release(self._holder))
