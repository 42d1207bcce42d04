"""Order in which nodes pull a version of the weights: a tree, so that no node serves all others.

The publisher's node has a new version first. A node that has the version serves at most `fanout`
pulls at a time, so (1 + fanout)**k nodes have the version after k rounds of pulls. Pure arithmetic:
the caller supplies the times.
"""


class BroadcastTree:
    """Decides which nodes may pull the newest version of the weights now, and which have to wait.

    `origin` is the publisher's node; node names are arbitrary. A node that has the version serves
    at most `fanout` pulls at a time. A pull that takes longer than `deadline_s` seconds no longer
    counts against this limit.
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
        the node may go. Pulls of an older version are always admitted. `now_s`: current time in
        seconds, on any clock.
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
        """Record that `node` has pulled `version`, so that other nodes may pull from it."""
        if version == self._newest_version:
            self._pull_starts_s.pop(node, None)
            self._ready_nodes.add(node)

    def remove_node(self, node: str) -> None:
        """Forget a node that left or failed to pull; other nodes no longer pull from it."""
        self._pull_starts_s.pop(node, None)
        if node != self._origin:
            self._ready_nodes.discard(node)
