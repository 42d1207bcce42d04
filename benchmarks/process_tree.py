"""CPU time and memory of a process tree, sampled while it runs."""

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import psutil

SAMPLE_S = 0.5
PSS_EVERY = 10
"""Samples per PSS measurement: for PSS the kernel walks every page table."""
TERM_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Usage:
    """Peak sums over the tree, in MB. RSS counts shared pages once per process, PSS once."""

    rss_mb: float
    pss_mb: float


class ProcessTree:
    """Context manager that samples the tree of a process in a thread.

    The CPU time includes finished processes up to their last sample.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[psutil.Process, float] = {}
        self._times: list[float] = []
        self._cpu_s: list[float] = []
        self._rss = self._pss = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="process-tree", daemon=True)

    def __enter__(self) -> "ProcessTree":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    @property
    def usage(self) -> Usage:
        return Usage(self._rss / 1e6, self._pss / 1e6)

    def cpu_s(self, start: float, end: float) -> float:
        """Return the CPU seconds between two values of `time.time`, interpolated."""
        at_start, at_end = np.interp([start, end], self._times, self._cpu_s)
        return float(at_end - at_start)

    def _sample(self) -> None:
        count = 0
        while True:
            last = self._done.wait(SAMPLE_S)
            processes = self._alive()
            rss = 0
            for process in processes:
                with contextlib.suppress(psutil.Error), process.oneshot():
                    spent = process.cpu_times()
                    self._seen[process] = spent.user + spent.system
                    rss += process.memory_info().rss
            self._times.append(time.time())
            self._cpu_s.append(sum(self._seen.values()))
            self._rss = max(self._rss, rss)
            count += 1
            if count % PSS_EVERY == 0:
                self._pss = max(self._pss, sum(map(_pss, processes)))
            if last:
                return

    def _alive(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []

    def kill(self) -> None:
        """Kill every process of the tree: SIGTERM to the root, then SIGKILL to the rest."""
        processes = {*self._alive(), *self._seen}
        with contextlib.suppress(psutil.Error):
            self._root.terminate()
        _, alive = psutil.wait_procs(processes, timeout=TERM_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=TERM_S)


def _pss(process: psutil.Process) -> int:
    """Return the PSS of a process in bytes; 0 if the process has exited."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup") as file:
            lines: Mapping[str, str] = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return 0
    return int(lines["Pss"].split()[0]) * 1024 if "Pss" in lines else 0
