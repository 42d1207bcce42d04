"""Messages between a shard and its clients: leased groups and commits."""

import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.buffer.encoding.column_codec import Blob, from_message, to_message
from streamrl.messages import GroupInfo, GroupLease, GroupOutcome


class LeaseGrant(msgspec.Struct, frozen=True, eq=False):
    """Reply of a shard that delivers a leased group; the client decodes it into an `Experience`.

    `prompt` is encoded. `blobs` contain the requested columns, and possibly more.
    `partial_rollouts` holds at most one blob, saved by an earlier holder of the stage.
    """

    lease: GroupLease
    admitted_version: int
    info: GroupInfo | None
    ready_version: int | None
    outcome: GroupOutcome | None
    prompt: bytes | None
    blobs: tuple[Any, ...]
    partial_rollouts: tuple[Any, ...] = ()


class ColumnBlobs(tuple[Any, ...]):
    """Blobs that contain the requested columns of a group, and possibly more columns."""

    __slots__ = ()


class ColumnCommit(msgspec.Struct, frozen=True, eq=False):
    """Encoded columns that a stage commits for a leased group.

    `column_sizes`: entries of each column. `info` is None if the columns are not those of rollouts.
    """

    lease: GroupLease
    blob: Blob
    column_sizes: Mapping[str, int]
    info: GroupInfo | None = None

    @property
    def uid(self) -> str:
        return self.lease.uid

    def __reduce__(self) -> tuple[Any, ...]:
        message = to_message(self.blob)
        return _unpickle_commit, (self.lease, message, self.column_sizes, self.info)


def _unpickle_commit(
    lease: GroupLease, message: Any, column_sizes: Mapping[str, int], info: GroupInfo | None
) -> ColumnCommit:
    return ColumnCommit(lease, from_message(message), column_sizes, info)


class FinishedGroup(msgspec.Struct, frozen=True):
    """A filtered or dropped group that the coordinator has not yet removed from the queue.

    `info` is None if the group ended before its rollouts were generated.
    """

    uid: str
    outcome: GroupOutcome
    info: GroupInfo | None


def get_shard_index(uid: str, count: int) -> int:
    """Return the index of the shard that owns a uid; equal in every process (CRC-32)."""
    return zlib.crc32(uid.encode()) % count
