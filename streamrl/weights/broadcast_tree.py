"""Order in which nodes pull a version: a tree, so that no single node serves all others.

The publisher's node has a new version first. A node that has the version serves at most `fanout`
pulls at a time, so (1 + fanout)**k nodes have it after k rounds. Pure arithmetic: the caller
supplies the times.
"""


class BroadcastTree:
    """Admission of pulls of the newest version. Node names are arbitrary; times are in seconds.

    `origin` is the publisher's node. A pull older than `deadline_s` stops counting against the
    limit.
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
        """Return True if a reader on `node` may pull `version` now, and record the pull.

        Readers share one copy per node: once a node has the version or pulls it, every reader on
        the node may go. Pulls of an older version are always admitted.
        """
        if version > self._newest_version:
            self._newest_version, self._ready_nodes, self._pull_starts_s = (
                version,
                {self._origin},
                {},
            )
        if version < self._newest_version or node in self._ready_nodes:
            return True
        # A pull past its deadline may still finish; it only stops counting below.
        if node in self._pull_starts_s:
            return True
        num_active = sum(
            now_s - start_s < self._deadline_s for start_s in self._pull_starts_s.values()
        )
        if num_active >= self._fanout * len(self._ready_nodes):
            return False
        self._pull_starts_s[node] = now_s
        return True

    def mark_pulled(self, node: str, version: int) -> None:
        """Record that `node` has `version`; the node now serves other nodes."""
        if version == self._newest_version:
            self._pull_starts_s.pop(node, None)
            self._ready_nodes.add(node)

    def remove_node(self, node: str) -> None:
        """Stop counting a node that left or failed to pull, and stop pulling from it."""
        self._pull_starts_s.pop(node, None)
        if node != self._origin:
            self._ready_nodes.discard(node)
