"""Memory use of process trees, read from /proc."""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

#: The cached process tree is valid for the longer of both: this age, and this multiple of the
#: scan's duration. The multiple bounds the scan's CPU share on machines with many processes.
_MAX_AGE_S = 0.04
_AGE_PER_SCAN_TIME = 4
_MEMORY_FIELDS = (b"RssAnon:", b"RssShmem:", b"VmPTE:")
#: The kernel returns at most one page of /proc/<pid>/maps per read.
_PAGE_BYTES = 4096


class ProcessTable:
    """Memory use of process trees; scans of /proc are cached and shared by callers. Thread-safe.

    mapping_bytes: kernel memory charged per memory mapping; 0: mappings are not counted, which is
        faster.
    """

    def __init__(self, *, mapping_bytes: int = 0) -> None:
        self._mapping_bytes = mapping_bytes
        self._children_by_pid: Mapping[int, Sequence[int]] = {}
        self._valid_until = 0.0
        self._refresh_lock = threading.Lock()

    def measure_tree_memory(self, root: int, *, enough: float = math.inf) -> int:
        """Return the memory of the process with pid `root` and all its descendants, bytes.

        Counts anonymous, shared and page-table memory. enough: stop counting above this number of
        bytes.
        """
        children = self._refresh_children()
        total = 0
        pending = [root]
        while pending and total <= enough:
            pid = pending.pop()
            total += self._measure_process_memory(pid, enough - total)
            pending += children.get(pid, ())
        return total

    def _refresh_children(self) -> Mapping[int, Sequence[int]]:
        """Return child pids by parent pid; scan /proc again if the last scan is too old."""
        with self._refresh_lock:
            started = time.monotonic()
            if started > self._valid_until:
                self._children_by_pid = list_children_by_parent()
                took_s = time.monotonic() - started
                self._valid_until = started + max(_MAX_AGE_S, _AGE_PER_SCAN_TIME * took_s)
            return self._children_by_pid

    def _measure_process_memory(self, pid: int, enough: float) -> int:
        """Return the memory of a process, bytes; 0 after its exit. File mappings do not count."""
        for proc_dir in _iter_proc_dirs(pid):
            used_bytes = sum(_read_memory_sizes(f"{proc_dir}/status"))
            if used_bytes and self._mapping_bytes:
                most = (enough - used_bytes) / self._mapping_bytes
                used_bytes += self._mapping_bytes * _count_mappings(f"{proc_dir}/maps", most)
            if used_bytes:
                return used_bytes
        return 0


def list_children_by_parent() -> Mapping[int, Sequence[int]]:
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            children[_read_parent_pid(name)].append(int(name))
    return children


def _read_parent_pid(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name may contain spaces and parentheses: parse after the last one.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _iter_proc_dirs(pid: int) -> Iterator[str]:
    """Yield the /proc directories of a process: its own, then those of its threads.

    If the main thread has exited, the process's own directory shows no memory, and the directory of
    each other thread shows the memory of the whole process.
    """
    yield f"/proc/{pid}"
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        yield f"/proc/{pid}/task/{thread}"


def _count_mappings(path: str, most: float) -> int:
    """Count the mappings in a /proc maps file, to soon after `most`; 0 if gone or unreadable."""
    count = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while count <= most and (chunk := file.read(_PAGE_BYTES)):
                count += chunk.count(b"\n")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return count


def _read_memory_sizes(path: str) -> list[int]:
    """Return the _MEMORY_FIELDS of a /proc status file, bytes; empty after the process's exit."""
    try:
        with open(path, "rb") as file:
            # Not splitlines(): a process name may contain \r, \f and other line boundaries.
            lines = file.read().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(_MEMORY_FIELDS)]
