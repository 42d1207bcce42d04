"""Time-weighted mean of the number of groups that wait for each stage."""

from collections.abc import Iterable


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
