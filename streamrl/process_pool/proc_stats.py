"""What the processes below one process hold in memory, as the kernel tells in /proc."""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

#: How old the list of processes may be, s, and how many times longer it is kept than it took to
#: make: on a machine with very many processes a look at all of them must not be most of the work.
_MAX_AGE_S = 0.04
_AGE_PER_SCAN_TIME = 4
_MEMORY_FIELDS = (b"RssAnon:", b"RssShmem:", b"VmPTE:")
#: The kernel gives no more than a page of a list of mappings at a time.
_PAGE_BYTES = 4096


class ProcessTable:
    """Which process started which, looked up together for all that ask at about the same time.

    mapping_bytes: what a mapping counts as, besides what it maps; 0: nothing, which looks quicker.
    """

    def __init__(self, *, mapping_bytes: int = 0) -> None:
        self._mapping_bytes = mapping_bytes
        self._children_by_pid: Mapping[int, Sequence[int]] = {}
        self._valid_until = 0.0
        self._refresh_lock = threading.Lock()

    def measure_tree_memory(self, root: int, *, enough: float = math.inf) -> int:
        """Bytes that process `root` and all below it hold for themselves, as of now.

        enough: it does not look further once it has found more than so many. From any thread.
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
        with self._refresh_lock:
            started = time.monotonic()
            if started > self._valid_until:
                self._children_by_pid = _list_children_by_parent()
                took_s = time.monotonic() - started
                self._valid_until = started + max(_MAX_AGE_S, _AGE_PER_SCAN_TIME * took_s)
            return self._children_by_pid

    def _measure_process_memory(self, pid: int, enough: float) -> int:
        """Bytes of its own, of shared memory, page tables and mappings; mapped files are none."""
        for place in _iter_proc_dirs(pid):
            found = sum(_read_memory_sizes(f"{place}/status"))
            if found and self._mapping_bytes:
                most = (enough - found) / self._mapping_bytes
                found += self._mapping_bytes * _count_mappings(f"{place}/maps", most)
            if found:
                return found
        return 0


def _list_children_by_parent() -> Mapping[int, Sequence[int]]:
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            children[_read_parent_pid(name)].append(int(name))
    return children


def _read_parent_pid(pid: str) -> int:
    """Its parent's id; 0 for a process that has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything; what follows it is plain.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _iter_proc_dirs(pid: int) -> Iterator[str]:
    """Where the kernel tells of a process: of its first thread, and if that has ended of others.

    All threads share one memory.
    """
    yield f"/proc/{pid}"
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for thread in threads:
        yield f"/proc/{pid}/task/{thread}"


def _count_mappings(path: str, most: float) -> int:
    """How many mappings a process has, counted until there are more than `most`.

    None of what has gone, nor of another user's process without the right to look into it.
    """
    count = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while count <= most and (part := file.read(_PAGE_BYTES)):
                count += part.count(b"\n")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return count


def _read_memory_sizes(path: str) -> list[int]:
    """The sizes in a status file, bytes; none of what has gone or holds no memory."""
    try:
        with open(path, "rb") as file:
            # Not splitlines: a process may put any other end of a line into its name.
            lines = file.read().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(_MEMORY_FIELDS)]
