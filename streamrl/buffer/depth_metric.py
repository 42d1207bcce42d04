"""Time-weighted means of how many groups wait for each stage."""

from collections.abc import Iterable


class DepthMeter:
    """Integrates depth over time, so that a step's figure is not one instant's luck."""

    def __init__(self, stages: Iterable[str], now: float) -> None:
        self._level = dict.fromkeys(stages, 0)
        self._area = dict.fromkeys(self._level, 0.0)
        self._since = dict.fromkeys(self._level, now)
        self._window_start = now

    def observe(self, stage: str, level: int, now: float) -> None:
        """From `now` (s) on, `level` groups wait for `stage`."""
        self._area[stage] += self._level[stage] * (now - self._since[stage])
        self._level[stage] = level
        self._since[stage] = now

    def means(self, now: float) -> dict[str, float]:
        """Mean depth per stage since the restart (the level itself if no time has passed)."""
        window = now - self._window_start
        means = {}
        for stage, level in list(self._level.items()):
            self.observe(stage, level, now)
            means[stage] = self._area[stage] / window if window > 0 else float(level)
        return means

    def restart(self, now: float) -> None:
        """Means begin anew."""
        for stage, level in list(self._level.items()):
            self.observe(stage, level, now)
            self._area[stage] = 0.0
        self._window_start = now
