"""What a shard reports of itself, step by step."""

import time
from collections import Counter
from dataclasses import replace

from streamrl.buffer.depth_metric import DepthMeter
from streamrl.buffer.group import ShardState
from streamrl.buffer.log.journal import RecordLog
from streamrl.buffer.wire_types import ShardStats

LEASE_COUNTERS = ("redelivered", "hedged", "refused")
"""Leases that are counted."""


class ShardStatsRecorder:
    """Counts leases and measures depths within a step of `book`'s shard; times are s."""

    def __init__(self, book: ShardState, log: RecordLog, now: float) -> None:
        self._state = book
        self._log = log
        self._version = book.version
        self._fsync_s = 0.0
        self._last_step_stats: ShardStats | None = None
        self.counts: Counter[str] = Counter()
        self.depth_meter = DepthMeter(book.stages, now)

    def compute_stats(self, now: float) -> ShardStats:
        """The figures; depths and counts are those since the last step's end."""
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
        """The figures of the step whose end makes `version`, also if asked for them again."""
        if version > self._version:
            self._last_step_stats = self.compute_stats(now)
            self._version, self._fsync_s = version, 0.0
            self.counts.clear()
            self.depth_meter.restart_window(now)
        return replace(
            self._last_step_stats or self.compute_stats(now), uids=tuple(self._state.groups)
        )
