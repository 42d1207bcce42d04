"""What the processes below one process hold in memory, as the kernel tells in /proc."""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

#: How old the list of processes may be, s, and how many times longer it is kept than it took to
#: make: on a machine with very many processes a look at all of them must not be most of the work.
_FRESH_S = 0.04
_SHARE = 4
_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmPTE:")


class ProcessTable:
    """Which process started which, looked up together for all that ask at about the same time."""

    def __init__(self) -> None:
        self._children: Mapping[int, Sequence[int]] = {}
        self._good_until = 0.0

    def memory_of_tree(self, root: int) -> int:
        """Bytes that process `root` and all below it hold for themselves, as of now."""
        started = time.monotonic()
        if started > self._good_until:
            self._children = _children_by_parent()
            took_s = time.monotonic() - started
            self._good_until = started + max(_FRESH_S, _SHARE * took_s)
        total = 0
        pending = [root]
        while pending:
            pid = pending.pop()
            total += _memory(pid)
            pending += self._children.get(pid, ())
        return total


def _children_by_parent() -> Mapping[int, Sequence[int]]:
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            children[_parent(name)].append(int(name))
    return children


def _parent(pid: str) -> int:
    """Its parent's id; 0 for a process that has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything; what follows it is plain.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _memory(pid: int) -> int:
    """Bytes of its own, of shared memory and of page tables; files it has mapped do not count."""
    found = _sizes(f"/proc/{pid}/status")
    if found:
        return sum(found)
    # Its first thread has ended, and tells nothing; all threads share one memory.
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    told = (_sizes(f"/proc/{pid}/task/{thread}/status") for thread in threads)
    return sum(next(filter(None, told), []))


def _sizes(path: str) -> list[int]:
    """The sizes in a status file, bytes; none of what has gone or holds no memory."""
    try:
        with open(path, "rb") as file:
            # Not splitlines: a process may put any other end of a line into its name.
            lines = file.read().split(b"\n")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED)]
