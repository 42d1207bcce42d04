"""Statistics of a queue shard per training step."""

import time
from collections import Counter
from dataclasses import replace

from streamrl.buffer.depth_metric import DepthMeter
from streamrl.buffer.group import ShardState
from streamrl.buffer.log.journal import RecordLog
from streamrl.buffer.wire_types import ShardStats

LEASE_COUNTERS = ("redelivered", "hedged", "refused")


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
