"""Order in which nodes pull a version of the weights: a tree, so that no node serves all others.

The publisher's node has a new version first. A node that has the version serves at most `fanout`
pulls at a time, so (1 + fanout)**k nodes have the version after k rounds of pulls. Pure arithmetic:
the caller supplies the times.
"""

import math
from collections import OrderedDict

from streamrl.weights.transport import estimate_send_s

FANOUT = 2
"""Pulls that a node serves at a time."""


class BroadcastTree:
    """Decides which nodes may pull the newest version of the weights now, and which have to wait.

    `origin` is the publisher's node; node names are arbitrary. A node that has the version serves
    at most `fanout` pulls at a time. A pull that takes longer than `deadline_s` seconds and the
    transfer time of the version no longer counts against this limit.
    """

    def __init__(self, origin: str, *, fanout: int = FANOUT, deadline_s: float = 60.0) -> None:
        if fanout < 1:
            raise ValueError(f"fanout={fanout}: must be at least 1")
        self._origin = origin
        self._fanout = fanout
        self._deadline_s = deadline_s
        #: Size of the newest version.
        self.num_bytes = 0
        self._newest_version = -1
        self._ready_nodes = {origin}
        self._pull_starts_s: dict[str, float] = {}
        self._counted_pulls: OrderedDict[str, float] = OrderedDict()
        """Pulls that are not past their deadline, oldest first, with their start."""

    def try_start_pull(self, node: str, version: int, now_s: float) -> bool:
        """Return True if a reader on `node` may pull `version` now, and record the pull.

        Readers share one copy per node: once a node has the version or pulls it, every reader on
        the node may go. Pulls of an older version are always admitted. `now_s`: current time in
        seconds, on any clock.
        """
        if version > self._newest_version:
            self._newest_version, self._ready_nodes = version, {self._origin}
            self._pull_starts_s.clear()
            self._counted_pulls.clear()
        if version < self._newest_version or node in self._ready_nodes:
            return True
        # A pull past its deadline may still finish; it only stops counting below.
        if node in self._pull_starts_s:
            return True
        if not self.count_free_slots(now_s):
            return False
        self._pull_starts_s[node] = self._counted_pulls[node] = now_s
        return True

    def count_free_slots(self, now_s: float) -> int:
        """Return how many further nodes may start a pull of the newest version now."""
        while self._counted_pulls and self.find_next_deadline() <= now_s:
            self._counted_pulls.popitem(last=False)
        return max(0, self._fanout * len(self._ready_nodes) - len(self._counted_pulls))

    def find_next_deadline(self) -> float:
        """Return when the next pull stops counting unless it ends; infinite without pulls."""
        oldest_s = next(iter(self._counted_pulls.values()), math.inf)
        return oldest_s + self._deadline_s + estimate_send_s(self._fanout * self.num_bytes)

    def mark_pulled(self, node: str, version: int) -> None:
        """Record that `node` has pulled `version`, so that other nodes may pull from it."""
        if version == self._newest_version:
            self._end_pull(node)
            self._ready_nodes.add(node)

    def remove_node(self, node: str) -> None:
        """Forget a node that left or failed to pull; other nodes no longer pull from it."""
        self._end_pull(node)
        if node != self._origin:
            self._ready_nodes.discard(node)

    def _end_pull(self, node: str) -> None:
        self._pull_starts_s.pop(node, None)
        self._counted_pulls.pop(node, None)
