"""A replica's hold on devices that it shares: from its first piece of work to the last."""

import asyncio
from collections.abc import Callable

from streamrl.stream.protocols import DeviceLease


class Holding:
    """Holds a lease while there is work: all pieces of one replica's work are under it together.

    `granted` is called each time it begins. Without a lease it is had at once.
    """

    def __init__(
        self, stage: str, lease: DeviceLease | None, granted: Callable[[], object]
    ) -> None:
        self._stage = stage
        self._lease = lease
        self._granted = granted
        self._works = 0
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.has = lease is None

    def begin(self, works: int = 1) -> None:
        """There are so many pieces of work more."""
        self._works += works
        if self._lease is None:
            self._granted()
        elif self._task is None:
            self._task = asyncio.create_task(self._hold(self._lease))
        elif self.has:
            self._granted()

    def end(self) -> None:
        """A piece of work is done."""
        self._works -= 1
        if not self._works and self._lease is not None:
            self.has = False
            self._idle.set()

    def close(self) -> None:
        """The replica is no more."""
        if self._task is not None:
            self._task.cancel()
        self.has = False

    async def _hold(self, lease: DeviceLease) -> None:
        while self._works:
            self._idle.clear()
            async with lease.hold(self._stage):
                self.has = bool(self._works)
                if self.has:
                    self._granted()
                    await self._idle.wait()
        self._task = None
