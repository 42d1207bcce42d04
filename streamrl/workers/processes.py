"""What the processes below one process hold in memory, as the kernel tells in /proc."""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

#: How old the list of processes may be, s, and how many times longer it is kept than it took to
#: make: on a machine with very many processes a look at all of them must not be most of the work.
_FRESH_S = 0.04
_SHARE = 4


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
    """Bytes of its own and of shared memory; files that it has mapped are not counted."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith((b"RssAnon:", b"RssShmem:"))]
    return sum(map(int, sizes)) * 1024
