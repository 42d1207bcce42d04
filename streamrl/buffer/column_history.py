"""Groups that got a column, in order, for a reader that asks again and again for the new ones."""

from collections.abc import Iterable

from streamrl.buffer.group import GroupState


class ColumnHistory:
    """Uids of the groups with a column since a position; a reader passes the last one it got."""

    def __init__(self, column: str, groups: Iterable[GroupState], start: int) -> None:
        """Begin at position `start` with the groups that have the column already."""
        self._column = column
        self._start = start
        self._uids: list[str] = []
        self._recorded_uids: set[str] = set()
        self.record_groups(groups)

    @property
    def end(self) -> int:
        """Position after the last recorded group."""
        return self._start + len(self._uids)

    def has_position(self, position: int) -> bool:
        """Return True if the history has all groups recorded after a position."""
        return self._start <= position <= self.end

    def record_groups(self, groups: Iterable[GroupState]) -> None:
        """Record those of the groups that have the column now."""
        for group in groups:
            if self._column in group.column_names and group.uid not in self._recorded_uids:
                self._recorded_uids.add(group.uid)
                self._uids.append(group.uid)

    def forget_group(self, uid: str) -> None:
        """Forget a group that left the shard."""
        self._recorded_uids.discard(uid)

    def read_after(self, position: int) -> list[str]:
        """Return the uids recorded after a position; discard those before, which the reader has.

        A repeated call returns the same.
        """
        del self._uids[: position - self._start]
        self._start = position
        return list(self._uids)
