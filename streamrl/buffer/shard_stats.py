"""Statistics of a queue shard per training step."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from streamrl.buffer.group import ShardState
from streamrl.buffer.journal import RecordLog

LEASE_COUNTERS = ("redelivered", "refused")


@dataclass(frozen=True)
class ShardStats:
    """Statistics of one queue shard, or of all shards together.

    `depth`: time-weighted mean of ready groups per stage since the last training step ended.
    `num_bytes`, `uids`: size and uids of the groups in the shard now.
    `oldest_age_s`: time since the earliest admission among these groups.
    `counts`: redelivered leases, and refused commits for groups that have not ended, since the last
    step.
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


class DepthMeter:
    """Computes the time-weighted mean of the number of groups ready for each stage.

    The mean covers a window, usually one training step. Times in s.
    """

    def __init__(self, stages: Iterable[str], now: float) -> None:
        self._depths = dict.fromkeys(stages, 0)
        self._depth_seconds = dict.fromkeys(self._depths, 0.0)
        self._since = dict.fromkeys(self._depths, now)
        self._window_start = now

    def observe_depth(self, stage: str, level: int, now: float) -> None:
        """Record that `level` groups are ready for a stage from `now` on."""
        self._depth_seconds[stage] += self._depths[stage] * (now - self._since[stage])
        self._depths[stage] = level
        self._since[stage] = now

    def compute_means(self, now: float) -> dict[str, float]:
        """Return the mean number of ready groups per stage since the window began.

        In a window of no length, return the current number.
        """
        window = now - self._window_start
        means = {}
        for stage, level in list(self._depths.items()):
            self.observe_depth(stage, level, now)
            means[stage] = self._depth_seconds[stage] / window if window > 0 else float(level)
        return means

    def restart_window(self, now: float) -> None:
        """Begin a new averaging window at `now`."""
        for stage, level in list(self._depths.items()):
            self.observe_depth(stage, level, now)
            self._depth_seconds[stage] = 0.0
        self._window_start = now


class ShardStatsRecorder:
    """Counts leases and measures queue depths of a shard within a training step. Times in s."""

    def __init__(self, state: ShardState, log: RecordLog, now: float) -> None:
        self._state = state
        self._log = log
        self._version = state.version
        self._fsync_s = 0.0
        self._last_step_stats: ShardStats | None = None
        self.counts: Counter[str] = Counter()
        self.depth_meter = DepthMeter(state.stages, now)

    def compute_stats(self, now: float) -> ShardStats:
        """Return the statistics since the last `end_step`."""
        groups = self._state.groups.values()
        self._fsync_s += self._log.drain_fsync_s()
        return ShardStats(
            depth=self.depth_meter.compute_means(now),
            num_bytes=sum(group.num_bytes for group in groups),
            oldest_age_s=max((now - group.admitted_at for group in groups), default=0.0),
            uids=tuple(self._state.groups),
            counts={name: self.counts[name] for name in LEASE_COUNTERS},
            journal_bytes=self._log.num_bytes,
            fsync_s=self._fsync_s,
            cpu_s=time.process_time(),
        )

    def end_step(self, version: int, now: float) -> ShardStats:
        """Return the statistics of the training step that ends with `version`; reset the counts.

        A repeated call for the same version returns the same statistics.
        """
        if version > self._version:
            self._last_step_stats = self.compute_stats(now)
            self._version, self._fsync_s = version, 0.0
            self.counts.clear()
            self.depth_meter.restart_window(now)
        return replace(
            self._last_step_stats or self.compute_stats(now), uids=tuple(self._state.groups)
        )
