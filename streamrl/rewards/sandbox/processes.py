"""What the processes below one process hold in memory, as the kernel tells in /proc."""

import os
from collections import defaultdict


def memory_of_tree(root: int) -> int:
    """Bytes that process `root` and all below it hold for themselves, as of now."""
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            children[_parent(name)].append(int(name))
    total = 0
    pending = [root]
    while pending:
        pid = pending.pop()
        total += _memory(pid)
        pending += children[pid]
    return total


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
