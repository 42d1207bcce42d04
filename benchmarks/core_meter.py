"""Number of busy cores, of a machine as a whole."""

import math
import os
import platform
from collections.abc import Mapping

import psutil

IDLE_TIME_FIELDS = frozenset({"idle", "iowait", "guest", "guest_nice"})
"""Fields of psutil.cpu_times that are no work; guest times are already part of user and nice."""


def read_machine_time() -> dict[str, float]:
    """Return the busy seconds of the cores that this process may use, spent by any process.

    The key is the name of the host.
    """
    cores = psutil.cpu_times(percpu=True)
    affinity = os.sched_getaffinity(0)
    busy = [
        seconds
        for number, core in enumerate(cores)
        if number in affinity
        for name, seconds in core._asdict().items()
        if name not in IDLE_TIME_FIELDS
    ]
    return {platform.node(): sum(busy)}


class CoreMeter:
    """Meter of the mean number of busy cores, from successive readings of CPU seconds."""

    def __init__(self) -> None:
        self._previous_times: Mapping[str, float] = {}
        self._measured_at = math.nan

    def measure_cores(self, times: Mapping[str, float], now: float) -> float:
        """Return the mean number of busy cores since the last call.

        times: CPU seconds so far, by process or host.
        now: time of the reading, in seconds.

        NaN at the first call, or if no time has passed. A process counts from its second reading
        on.
        """
        cpu_seconds = [
            max(0.0, s - self._previous_times[name])
            for name, s in times.items()
            if name in self._previous_times
        ]
        elapsed_s = now - self._measured_at
        self._previous_times, self._measured_at = dict(times), now
        return sum(cpu_seconds) / elapsed_s if elapsed_s > 0 else math.nan
