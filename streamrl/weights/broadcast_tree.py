"""How a version goes through a cluster: as a tree, so that no node has to serve all others.

The publisher's node has a new version first. A node that has it serves at most `fanout` others at
a time, so after k rounds (1 + fanout)**k nodes have it. Pure arithmetic on times that are given.
"""


class BroadcastTree:
    """Who may pull the newest version now. Nodes are known by any name, times are seconds.

    `origin` is the publisher's node; a pull that is not done within `deadline_s` counts no more.
    """

    def __init__(self, origin: str, *, fanout: int = 2, deadline_s: float = 60.0) -> None:
        if fanout < 1:
            raise ValueError(f"fanout={fanout}: must be at least 1")
        self._origin = origin
        self._fanout = fanout
        self._deadline_s = deadline_s
        self._newest_version = -1
        self._ready_nodes = {origin}
        self._pull_starts_s: dict[str, float] = {}

    def try_start_pull(self, node: str, version: int, now_s: float) -> bool:
        """Whether a reader on `node` may pull `version` now; if so, the node is pulling.

        Others on a node that has it or pulls it may go at once: they share one copy. So may those
        who still want an older version: nobody waits for it.
        """
        if version > self._newest_version:
            self._newest_version, self._ready_nodes, self._pull_starts_s = (
                version,
                {self._origin},
                {},
            )
        if version < self._newest_version or node in self._ready_nodes:
            return True
        if (
            node in self._pull_starts_s
        ):  # one that has taken too long may go on, on nobody's account
            return True
        live = sum(now_s - since < self._deadline_s for since in self._pull_starts_s.values())
        if live >= self._fanout * len(self._ready_nodes):
            return False
        self._pull_starts_s[node] = now_s
        return True

    def mark_pulled(self, node: str, version: int) -> None:
        """The node has the version, and others may pull it from there."""
        if version == self._newest_version:
            self._pull_starts_s.pop(node, None)
            self._ready_nodes.add(node)

    def remove_node(self, node: str) -> None:
        """The node is gone, or failed to pull: nobody waits for it and it serves nobody."""
        self._pull_starts_s.pop(node, None)
        if node != self._origin:
            self._ready_nodes.discard(node)
