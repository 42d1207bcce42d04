"""Messages between a shard and its clients: leased groups, commits, statistics."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streamrl.buffer.codec import Blob
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


class ColumnCommit(msgspec.Struct, frozen=True, eq=False):
    """Encoded columns that a stage commits for a leased group.

    `column_sizes`: entries of each column. `info` is None if the columns are not those of rollouts.
    """

    lease: GroupLease
    blob: Blob
    column_sizes: Mapping[str, int]
    info: GroupInfo | None = None


class FinishedGroup(msgspec.Struct, frozen=True):
    """A filtered or dropped group that the coordinator has not yet removed from the queue.

    `info` is None if the group ended before its rollouts were generated.
    """

    uid: str
    outcome: GroupOutcome
    info: GroupInfo | None


@dataclass(frozen=True)
class ShardStats:
    """Statistics of one queue shard, or of all shards together.

    `depth`: time-weighted mean of ready groups per stage since the last training step ended.
    `num_bytes`, `uids`: size and uids of the groups in the shard now.
    `oldest_age_s`: time since the earliest admission among these groups.
    `counts`: redelivered, hedged and refused leases since the last step; refusals without a fault,
    such as the slower of two hedges, are left out.
    `fsync_s`: time spent in fsync since the last step.
    `cpu_s`: CPU time of the process since its start.
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
