"""Messages between a shard and its clients: leased groups, commits, statistics."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streamrl.buffer.codec import Blob
from streamrl.messages import GroupInfo, GroupLease, GroupOutcome


class LeaseGrant(msgspec.Struct, frozen=True, eq=False):
    """A leased group: fields of its `Experience`, encoded prompt, blobs of the requested columns.

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


class ColumnCommit(msgspec.Struct, frozen=True, eq=False):
    lease: GroupLease
    blob: Blob
    column_sizes: Mapping[str, int]
    info: GroupInfo | None = None


class FinishedGroup(msgspec.Struct, frozen=True):
    """A group that ends untrained; the coordinator has not yet removed it from the queue.

    `info` is None if the group ended before it was generated.
    """

    uid: str
    outcome: GroupOutcome
    info: GroupInfo | None


@dataclass(frozen=True)
class ShardStats:
    """Statistics of one shard.

    `depth`: time-weighted mean of ready groups per stage since the last step ended.
    `counts`: redelivered, hedged and refused leases since then; refusals without a fault, such
    as the slower of two hedges, are left out.
    `fsync_s`: time spent in fsync since then. `cpu_s`: CPU time of the process since its start.
    """

    depth: Mapping[str, float]
    num_bytes: int
    oldest_age_s: float
    uids: tuple[str, ...]
    counts: Mapping[str, int]
    journal_bytes: int = 0
    fsync_s: float = 0.0
    cpu_s: float = 0.0


def merge_stats(shard_stats: Sequence[ShardStats]) -> ShardStats:
    return ShardStats(
        depth={s: sum(stats.depth[s] for stats in shard_stats) for s in shard_stats[0].depth},
        num_bytes=sum(stats.num_bytes for stats in shard_stats),
        oldest_age_s=max(stats.oldest_age_s for stats in shard_stats),
        uids=tuple(uid for stats in shard_stats for uid in stats.uids),
        counts={
            name: sum(stats.counts[name] for stats in shard_stats) for name in shard_stats[0].counts
        },
        journal_bytes=sum(stats.journal_bytes for stats in shard_stats),
        fsync_s=sum(stats.fsync_s for stats in shard_stats),
        cpu_s=sum(stats.cpu_s for stats in shard_stats),
    )


def get_shard_index(uid: str, count: int) -> int:
    """Return the index of the shard that owns a uid; equal in every process (CRC-32)."""
    return zlib.crc32(uid.encode()) % count
