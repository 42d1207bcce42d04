"""A replica's hold on devices that it shares: from its first piece of work to the last."""

import asyncio
from collections.abc import Callable

from streamrl.stream.protocols import DeviceLease


class DeviceHold:
    """Holds a lease while there is work: all pieces of one replica's work are under it together.

    `granted` is called each time it begins. Without a lease it is had at once.
    """

    def __init__(
        self, stage: str, lease: DeviceLease | None, granted: Callable[[], object]
    ) -> None:
        self._stage = stage
        self._lease = lease
        self._on_granted = granted
        self._num_pending = 0
        self._idle_event = asyncio.Event()
        self._hold_task: asyncio.Task[None] | None = None
        self.is_held = lease is None

    def begin_work(self, works: int = 1) -> None:
        """There are so many pieces of work more."""
        self._num_pending += works
        if self._lease is None:
            self._on_granted()
        elif self._hold_task is None:
            self._hold_task = asyncio.create_task(self._hold_lease(self._lease))
        elif self.is_held:
            self._on_granted()

    def end_work(self) -> None:
        """A piece of work is done."""
        self._num_pending -= 1
        if not self._num_pending and self._lease is not None:
            self.is_held = False
            self._idle_event.set()

    def close(self) -> None:
        """The replica is no more."""
        if self._hold_task is not None:
            self._hold_task.cancel()
        self.is_held = False

    async def _hold_lease(self, lease: DeviceLease) -> None:
        while self._num_pending:
            self._idle_event.clear()
            async with lease.hold(self._stage):
                self.is_held = bool(self._num_pending)
                if self.is_held:
                    self._on_granted()
                    await self._idle_event.wait()
        self._hold_task = None
