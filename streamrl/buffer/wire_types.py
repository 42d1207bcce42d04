"""What a shard and its callers hand each other: leased groups, finished work, figures."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streamrl.buffer.codec import Blob
from streamrl.messages import GroupInfo, GroupLease, GroupOutcome


class LeaseGrant(msgspec.Struct, frozen=True, eq=False):
    """A leased group: what an Experience says of it, its encoded prompt, blobs with the columns.

    `begun` is a blob, or none, of what an earlier holder had begun.
    """

    lease: GroupLease
    admitted_version: int
    info: GroupInfo | None
    ready_version: int | None
    outcome: GroupOutcome | None
    prompt: bytes | None
    blobs: tuple[Any, ...]
    partial_rollouts: tuple[Any, ...] = ()


class ColumnCommit(msgspec.Struct, frozen=True, eq=False):
    """Finished work: the blob, and the entries of each column in it."""

    lease: GroupLease
    blob: Blob
    column_sizes: Mapping[str, int]
    info: GroupInfo | None = None


class FinishedGroup(msgspec.Struct, frozen=True):
    """A group that will not be trained, and of which the coordinator is yet to hear.

    `info` is there if it was generated.
    """

    uid: str
    outcome: GroupOutcome
    info: GroupInfo | None


@dataclass(frozen=True)
class ShardStats:
    """What a shard reports: mean groups waiting per stage since the last step, and sizes.

    `counts` are redelivered, hedged and refused leases since the last step, of the last only those
    that some fault is behind; `fsync_s` the time
    spent in fsync since then; `cpu_s` its process's processor time since it began.
    """

    depth: Mapping[str, float]
    num_bytes: int
    oldest_age_s: float
    uids: tuple[str, ...]
    counts: Mapping[str, int]
    journal_bytes: int = 0
    fsync_s: float = 0.0
    cpu_s: float = 0.0


def merge_stats(parts: Sequence[ShardStats]) -> ShardStats:
    """The figures of all shards as one."""
    return ShardStats(
        depth={s: sum(part.depth[s] for part in parts) for s in parts[0].depth},
        num_bytes=sum(part.num_bytes for part in parts),
        oldest_age_s=max(part.oldest_age_s for part in parts),
        uids=tuple(uid for part in parts for uid in part.uids),
        counts={name: sum(part.counts[name] for part in parts) for name in parts[0].counts},
        journal_bytes=sum(part.journal_bytes for part in parts),
        fsync_s=sum(part.fsync_s for part in parts),
        cpu_s=sum(part.cpu_s for part in parts),
    )


def get_shard_index(uid: str, count: int) -> int:
    """Index of the shard, of so many, that owns a uid; the same in every process."""
    return zlib.crc32(uid.encode()) % count
