"""Capacity of a shard: reservations, and the queue of admissions while the shard is full."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from streamrl.buffer.config import ShardCapacity
from streamrl.buffer.encoding.column_codec import Blob, count_blob_bytes
from streamrl.buffer.group import GroupState, ShardState
from streamrl.buffer.log.segment_file import JournalRecord
from streamrl.errors import DeadlineError


class PendingAdmission(msgspec.Struct, frozen=True, eq=False):
    """A group to be inserted into a shard.

    `records`: journal records of the admission and, for a group with columns, of a commit. `blob`:
    the columns of that commit.
    """

    uid: str
    records: Sequence[JournalRecord]
    blob: Blob = b""


class CapacityLimiter:
    """Keeps a shard within its capacity. Times: s of the event loop.

    A group reserves at least `reserved_group_bytes` until its columns are complete, and its actual
    size after that. So admission is the only operation that waits for capacity. `enter` inserts
    groups into the shard.
    """

    def __init__(
        self,
        state: ShardState,
        capacity: ShardCapacity,
        *,
        enter: Callable[[Sequence[PendingAdmission]], Awaitable[None]],
    ) -> None:
        self._state = state
        self._capacity = capacity
        self._insert_groups = enter
        self._pending_bytes: dict[str, int] = {}
        self._reserved_bytes = 0
        self._num_inserts = 0
        self._capacity_freed = asyncio.Event()

    async def admit_groups(
        self, admissions: Sequence[PendingAdmission], deadline: float
    ) -> list[str]:
        """Admit as many groups as fit, at least one; return the uids that are admitted by now.

        Uids of a retried call count as admitted, also if they are removed by now. Returns as soon
        as some groups are admitted. Raises DeadlineError if no group fits by `deadline`.
        """
        least_bytes = min(map(self._measure_admission, admissions), default=0)
        while not (admitted := self._list_admitted(admissions)):
            batch = self._reserve_capacity(admissions)
            if batch:
                try:
                    await self._insert_groups(batch)
                finally:
                    for admission in batch:
                        self._reserved_bytes -= self._pending_bytes.pop(admission.uid)
                    self._num_inserts += 1
                    self._capacity_freed.set()
            else:
                await self._wait_for_capacity(least_bytes, deadline, admissions[0].uid)
        return admitted

    def _list_admitted(self, admissions: Sequence[PendingAdmission]) -> list[str]:
        return [a.uid for a in admissions if self._state.has_seen(a.uid)]

    def _measure_admission(self, admission: PendingAdmission) -> int:
        """Return the bytes to reserve for an admission."""
        # Capped, so that a group larger than the shard can enter an empty one.
        size = min(count_blob_bytes(admission.blob), self._capacity.max_bytes)
        return int(max(size, self._capacity.reserved_group_bytes, 1))

    def _reserve_capacity(self, admissions: Sequence[PendingAdmission]) -> list[PendingAdmission]:
        """Reserve capacity for as many admissions as fit now; return these admissions."""
        batch = []
        for admission in admissions:
            num_bytes = self._measure_admission(admission)
            if admission.uid not in self._pending_bytes and self._has_capacity(num_bytes):
                self._pending_bytes[admission.uid] = num_bytes
                self._reserved_bytes += num_bytes
                batch.append(admission)
        return batch

    def update_reservation(self, group: GroupState) -> None:
        """Adjust the bytes reserved for a group after its columns changed or it was removed."""
        self._reserved_bytes -= group.reserved_bytes
        group.reserved_bytes = (
            self._compute_required_bytes(group) if group.uid in self._state.groups else 0
        )
        self._reserved_bytes += group.reserved_bytes
        self._capacity_freed.set()

    def _compute_required_bytes(self, group: GroupState) -> int:
        """Return the bytes to reserve for a group: its size, at least a minimum until complete."""
        if self._state.is_complete(group):
            return group.num_bytes
        return max(group.num_bytes, self._capacity.reserved_group_bytes)

    def _has_capacity(self, num_bytes: int) -> bool:
        has_bytes = self._reserved_bytes + num_bytes <= self._capacity.max_bytes
        return (
            has_bytes
            and len(self._state.groups) + len(self._pending_bytes) < self._capacity.max_groups
        )

    async def _wait_for_capacity(self, num_bytes: int, deadline: float, uid: str) -> None:
        """Wait until a group of `num_bytes` may fit, or until groups of another call are in."""
        num_inserts = self._num_inserts
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    self._capacity_freed.clear()
                    await self._capacity_freed.wait()
                    # After an insert, the groups of a repeated call may be in the shard.
                    if self._num_inserts != num_inserts or self._has_capacity(num_bytes):
                        return
        except TimeoutError:
            uids, capacity = list(self._state.groups), self._capacity
            raise DeadlineError(
                f"prompt {uid} waited for capacity in a full shard: it holds {len(uids)} of"
                f" {capacity.max_groups} groups and {self._reserved_bytes} of"
                f" {capacity.max_bytes:g} bytes;"
                f" the first are {uids[:5]}"
            ) from None
