"""A replica's hold on shared devices, from its first piece of pending work to the last."""

import asyncio
from collections.abc import Callable

from streamrl.stream.protocols import DeviceLease


class SimulatedDeviceHold:
    """Holds a device lease while a replica has pending work.

    `on_granted` is called whenever the devices are granted. Without a lease the devices belong to
    the replica, and are granted at once.
    """

    def __init__(
        self, stage: str, lease: DeviceLease | None, on_granted: Callable[[], object]
    ) -> None:
        self._stage = stage
        self._lease = lease
        self._on_granted = on_granted
        self._num_pending = 0
        self._idle_event = asyncio.Event()
        self._hold_task: asyncio.Task[None] | None = None
        self.is_held = lease is None

    def begin_work(self, count: int = 1) -> None:
        """Count `count` more pieces of pending work; acquire the device lease with the first."""
        self._num_pending += count
        if self._lease is None:
            self._on_granted()
        elif self._hold_task is None:
            self._hold_task = asyncio.create_task(self._hold_lease(self._lease))
        elif self.is_held:
            self._on_granted()

    def end_work(self) -> None:
        """Count a piece of pending work as done; release the device lease after the last."""
        self._num_pending -= 1
        if not self._num_pending and self._lease is not None:
            self.is_held = False
            self._idle_event.set()

    def close(self) -> None:
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
