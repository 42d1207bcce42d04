"""The way into a shard: who may come in, and what waits while it is full."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from streamrl.buffer.codec import Blob, count_blob_bytes
from streamrl.buffer.config import ShardCapacity
from streamrl.buffer.group import GroupState, ShardState
from streamrl.buffer.log.segment_file import JournalRecord
from streamrl.errors import DeadlineError


class PendingAdmission(msgspec.Struct, frozen=True, eq=False):
    """A group on its way in: its records, and the blob of the last if it brings columns."""

    uid: str
    records: Sequence[JournalRecord]
    blob: Blob = b""


class CapacityLimiter:
    """Keeps a shard within its bounds. Times are s of the shard's clock.

    Each group is charged with the most it can take until its last column is there, and with what it
    takes from then on: only who comes in ever waits for room. `enter` puts groups into the book.
    """

    def __init__(
        self,
        book: ShardState,
        bounds: ShardCapacity,
        *,
        clock: Callable[[], float],
        enter: Callable[[Sequence[PendingAdmission]], Awaitable[None]],
    ) -> None:
        self._state = book
        self._capacity = bounds
        self._clock = clock
        self._insert_groups = enter
        self._pending_bytes: dict[str, int] = {}
        self._reserved_bytes = 0
        self._capacity_freed = asyncio.Event()

    async def admit_groups(
        self, arrivals: Sequence[PendingAdmission], deadline: float
    ) -> list[str]:
        """Let in as many as there is room for, one at least; returns the uids that are in.

        Those of a call made again are in, though they may have left. Nothing waits once a part is
        in. Raises DeadlineError if there is no room by `deadline`.
        """
        while not self._list_admitted(arrivals):
            batch = self._reserve_capacity(arrivals)
            if batch:
                try:
                    await self._insert_groups(batch)
                finally:
                    for one in batch:
                        self._reserved_bytes -= self._pending_bytes.pop(one.uid)
                    self._capacity_freed.set()
            else:
                await self._wait_for_capacity(deadline, arrivals[0].uid)
        return self._list_admitted(arrivals)

    def _list_admitted(self, arrivals: Sequence[PendingAdmission]) -> list[str]:
        return [one.uid for one in arrivals if self._state.has_seen(one.uid)]

    def _reserve_capacity(self, arrivals: Sequence[PendingAdmission]) -> list[PendingAdmission]:
        """Those that are not on their way by another call, as far as there is room."""
        batch = []
        for one in arrivals:
            # One that is too large for any shard comes into an empty one.
            size = min(count_blob_bytes(one.blob), self._capacity.max_bytes)
            num_bytes = int(max(size, self._capacity.reserved_group_bytes, 1))
            if one.uid not in self._pending_bytes and self._has_capacity(num_bytes):
                self._pending_bytes[one.uid] = num_bytes
                self._reserved_bytes += num_bytes
                batch.append(one)
        return batch

    def update_reservation(self, group: GroupState) -> None:
        """Bring the account in line with a group that has changed or left."""
        self._reserved_bytes -= group.reserved_bytes
        group.reserved_bytes = self._required_bytes(group) if group.uid in self._state.groups else 0
        self._reserved_bytes += group.reserved_bytes
        self._capacity_freed.set()

    def _required_bytes(self, group: GroupState) -> int:
        whole = self._state.is_complete(group)
        return (
            group.num_bytes if whole else max(group.num_bytes, self._capacity.reserved_group_bytes)
        )

    def _has_capacity(self, num_bytes: int) -> bool:
        has_bytes = self._reserved_bytes + num_bytes <= self._capacity.max_bytes
        return (
            has_bytes
            and len(self._state.groups) + len(self._pending_bytes) < self._capacity.max_groups
        )

    async def _wait_for_capacity(self, deadline: float, uid: str) -> None:
        self._capacity_freed.clear()
        try:
            await asyncio.wait_for(self._capacity_freed.wait(), deadline - self._clock())
        except TimeoutError:
            held, bounds = list(self._state.groups), self._capacity
            raise DeadlineError(
                f"prompt {uid} waited for room in a full shard: it holds {len(held)} of"
                f" {bounds.max_groups} groups and {self._reserved_bytes} of"
                f" {bounds.max_bytes:g} bytes;"
                f" the first are {held[:5]}"
            ) from None
