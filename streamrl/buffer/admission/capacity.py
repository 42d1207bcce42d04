"""The way into a shard: who may come in, and what waits while it is full."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from streamrl.buffer.codec import Blob, size_of
from streamrl.buffer.config import Bounds
from streamrl.buffer.group import Group, GroupBook
from streamrl.buffer.log.segment_file import Record
from streamrl.errors import DeadlineError


class Arrival(msgspec.Struct, frozen=True, eq=False):
    """A group on its way in: its records, and the blob of the last if it brings columns."""

    uid: str
    records: Sequence[Record]
    blob: Blob = b""


class Entrance:
    """Keeps a shard within its bounds. Times are s of the shard's clock.

    Each group is charged with the most it can take until its last column is there, and with what it
    takes from then on: only who comes in ever waits for room. `enter` puts groups into the book.
    """

    def __init__(
        self,
        book: GroupBook,
        bounds: Bounds,
        *,
        clock: Callable[[], float],
        enter: Callable[[Sequence[Arrival]], Awaitable[None]],
    ) -> None:
        self._book = book
        self._bounds = bounds
        self._clock = clock
        self._enter = enter
        self._arriving: dict[str, int] = {}
        self._charged = 0
        self._space = asyncio.Event()

    async def admit(self, arrivals: Sequence[Arrival], deadline: float) -> list[str]:
        """Let in as many as there is room for, one at least; returns the uids that are in.

        Those of a call made again are in, though they may have left. Nothing waits once a part is
        in. Raises DeadlineError if there is no room by `deadline`.
        """
        while not self._inside(arrivals):
            batch = self._let_in(arrivals)
            if batch:
                try:
                    await self._enter(batch)
                finally:
                    for one in batch:
                        self._charged -= self._arriving.pop(one.uid)
                    self._space.set()
            else:
                await self._wait_space(deadline, arrivals[0].uid)
        return self._inside(arrivals)

    def _inside(self, arrivals: Sequence[Arrival]) -> list[str]:
        return [one.uid for one in arrivals if self._book.has_had(one.uid)]

    def _let_in(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """Those that are not on their way by another call, as far as there is room."""
        batch = []
        for one in arrivals:
            # One that is too large for any shard comes into an empty one.
            size = min(size_of(one.blob), self._bounds.num_bytes)
            num_bytes = int(max(size, self._bounds.group_bytes, 1))
            if one.uid not in self._arriving and self._has_room(num_bytes):
                self._arriving[one.uid] = num_bytes
                self._charged += num_bytes
                batch.append(one)
        return batch

    def charge(self, group: Group) -> None:
        """Bring the account in line with a group that has changed or left."""
        self._charged -= group.charge
        group.charge = self._cost(group) if group.uid in self._book.groups else 0
        self._charged += group.charge
        self._space.set()

    def _cost(self, group: Group) -> int:
        whole = self._book.is_whole(group)
        return group.num_bytes if whole else max(group.num_bytes, self._bounds.group_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        has_bytes = self._charged + num_bytes <= self._bounds.num_bytes
        return has_bytes and len(self._book.groups) + len(self._arriving) < self._bounds.groups

    async def _wait_space(self, deadline: float, uid: str) -> None:
        self._space.clear()
        try:
            await asyncio.wait_for(self._space.wait(), deadline - self._clock())
        except TimeoutError:
            held, bounds = list(self._book.groups), self._bounds
            raise DeadlineError(
                f"prompt {uid} waited for room in a full shard: it holds {len(held)} of"
                f" {bounds.groups} groups and {self._charged} of {bounds.num_bytes:g} bytes;"
                f" the first are {held[:5]}"
            ) from None
