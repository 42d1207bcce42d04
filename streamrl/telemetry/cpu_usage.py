"""How many cores are busy: of a machine as a whole, and with the processes of a run."""

import math
import os
import platform
import time
from collections.abc import Mapping

import psutil

IDLE_TIME_FIELDS = frozenset({"idle", "iowait", "guest", "guest_nice"})
"""Times of a processor in which it computes nothing, or that are part of others."""


def read_process_time() -> dict[str, float]:
    """Processor seconds of this process since it began, by a name that no other process has."""
    return {f"{platform.node()}:{os.getpid()}": time.process_time()}


def read_machine_time() -> dict[str, float]:
    """Busy seconds of all the cores that this process may use, whoever keeps them busy."""
    cores = psutil.cpu_times(percpu=True)
    mine = os.sched_getaffinity(0)
    busy = [
        seconds
        for number, core in enumerate(cores)
        if number in mine
        for name, seconds in core._asdict().items()
        if name not in IDLE_TIME_FIELDS
    ]
    return {platform.node(): sum(busy)}


class CoreMeter:
    """Cores that were kept busy, on average, since it was asked last."""

    def __init__(self) -> None:
        self._previous_times: Mapping[str, float] = {}
        self._measured_at = math.nan

    def measure_cores(self, times: Mapping[str, float], now: float) -> float:
        """Of processor seconds so far by process; NaN at first, or where no time has passed.

        Who was not there before, or began anew, does not count yet.
        """
        spent = [
            max(0.0, s - self._previous_times[name])
            for name, s in times.items()
            if name in self._previous_times
        ]
        passed_s, self._previous_times, self._measured_at = (
            now - self._measured_at,
            dict(times),
            now,
        )
        return sum(spent) / passed_s if passed_s > 0 else math.nan
