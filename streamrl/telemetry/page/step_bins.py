"""Steps of a long run in bins, so that a chart has a bounded number of points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array

MAX_BINS = 800
"""Most points of a line. A screen has about as many columns."""


@dataclass(frozen=True)
class StepBins:
    """Consecutive steps of the same number, the last bin possibly with fewer.

    steps: int64 [S], ascending. starts: int64 [B], index of each bin's first step.
    """

    steps: Array
    starts: Array

    @classmethod
    def from_steps(cls, steps: Array, *, max_bins: int = MAX_BINS) -> "StepBins":
        size = max(1, math.ceil(len(steps) / max_bins))
        return cls(steps, np.arange(0, len(steps), size))

    @property
    def last_steps(self) -> list[int]:
        """Last step of each bin: where its point is drawn."""
        ends = [*self.starts[1:], len(self.steps)]
        return [int(self.steps[end - 1]) for end in ends]

    @property
    def labels(self) -> list[str]:
        """Steps of each bin in words, "step 3" or "steps 11 to 20"."""
        # A step may stand for those since the step before.
        ends = [step + 1 for step in self.last_steps[:-1]]
        first = [int(self.steps[0]), *ends] if len(self.steps) else []
        return [
            f"step {last}" if start == last else f"steps {start} to {last}"
            for start, last in zip(first, self.last_steps, strict=True)
        ]

    def average(self, column: Array) -> list[float | None]:
        """Return a column's mean per bin, over the steps with a value; None without any."""
        if not len(column):
            return []
        is_known = np.isfinite(column)
        totals = np.add.reduceat(np.where(is_known, column, 0.0), self.starts)
        counts = np.add.reduceat(is_known.astype(np.int64), self.starts)
        return [
            float(total / count) if count else None
            for total, count in zip(totals, counts, strict=True)
        ]

    def take_largest(self, column: Array) -> list[float | None]:
        """Return a column's largest value per bin; None without any."""
        if not len(column):
            return []
        largest = np.maximum.reduceat(np.where(np.isfinite(column), column, -math.inf), self.starts)
        return [float(value) if math.isfinite(value) else None for value in largest]

    def add_up(self, table: Array) -> Array:
        """Return the sums of a table's rows per bin, [B, ...], for a table [S, ...]."""
        return np.add.reduceat(table, self.starts, axis=0) if len(table) else table


def to_shares(table: Array) -> list[list[float | None]]:
    """Return the rows of a table as fractions of their sums; None in rows without any."""
    totals = table.sum(axis=1, keepdims=True)
    shares: Sequence[Array] = np.divide(
        table, totals, out=np.full(table.shape, math.nan), where=totals > 0
    )
    return [[None if math.isnan(v) else round(float(v), 4) for v in row] for row in shares]
