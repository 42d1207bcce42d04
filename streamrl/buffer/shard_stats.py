"""What a shard reports of itself, step by step."""

import time
from collections import Counter
from dataclasses import replace

from streamrl.buffer.depth_metric import DepthMeter
from streamrl.buffer.group import GroupBook
from streamrl.buffer.log.journal import Log
from streamrl.buffer.wire_types import ShardStats

COUNTED = ("redelivered", "hedged", "refused")
"""Leases that are counted."""


class Figures:
    """Counts leases and measures depths within a step of `book`'s shard; times are s."""

    def __init__(self, book: GroupBook, log: Log, now: float) -> None:
        self._book = book
        self._log = log
        self._version = book.version
        self._fsync_s = 0.0
        self._ended: ShardStats | None = None
        self.counts: Counter[str] = Counter()
        self.depth = DepthMeter(book.stages, now)

    def stats(self, now: float) -> ShardStats:
        """The figures; depths and counts are those since the last step's end."""
        groups = self._book.groups.values()
        self._fsync_s += self._log.drain_fsync_s()
        return ShardStats(
            depth=self.depth.means(now),
            num_bytes=sum(group.num_bytes for group in groups),
            oldest_age_s=max((now - group.admitted_at for group in groups), default=0.0),
            uids=tuple(self._book.groups),
            counts={name: self.counts[name] for name in COUNTED},
            journal_bytes=self._log.num_bytes,
            fsync_s=self._fsync_s,
            cpu_s=time.process_time(),
        )

    def end_step(self, version: int, now: float) -> ShardStats:
        """The figures of the step whose end makes `version`, also if asked for them again."""
        if version > self._version:
            self._ended = self.stats(now)
            self._version, self._fsync_s = version, 0.0
            self.counts.clear()
            self.depth.restart(now)
        return replace(self._ended or self.stats(now), uids=tuple(self._book.groups))
