"""How the weights of a run travel: the transport that was chosen, and what its ends must know."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.weights.broadcast_tree import BroadcastTree
from streamrl.weights.config import DELTA, OBJECT_STORE, SHARED_MEMORY
from streamrl.weights.transport_choice import TransportDecision
from streamrl.weights.transports.shm_segments import (
    SEGMENT_PREFIX,
    SHARED_MEMORY_DIR,
    remove_stale_segments,
)

CLEANUP_TIMEOUT_S = 2.0
"""Longest that ended publishers are waited for, s; the next publisher clears up after others."""


@dataclass(frozen=True)
class TransportSpec:
    """Told to every actor of a run; `travel_ends` makes its ends.

    `token` tells the run from others on the machine. `room`: most bytes of shared memory for each
    role that is published. `node`: where all have to be who publish or follow; empty for anywhere.
    """

    decision: TransportDecision
    token: str
    run_dir: Path
    keep_versions: int
    max_bytes: Mapping[str, int]
    node: str = ""

    def make_broadcast_tree(self, origin: str) -> BroadcastTree | None:
        """Who may pull from whom, with publishers on the node `origin`.

        Where every node takes a copy of its own, some wait for others that have one.
        """
        return BroadcastTree(origin) if self.decision.transport in (OBJECT_STORE, DELTA) else None

    def clean_up(self) -> None:
        """Take away what publishers that were ended have left in memory."""
        if self.decision.transport != SHARED_MEMORY:
            return
        deadline = time.monotonic() + CLEANUP_TIMEOUT_S
        # They may not be quite gone: until then what they hold is theirs.
        while any(SHARED_MEMORY_DIR.glob(f"{SEGMENT_PREFIX}{self.token}*")):
            remove_stale_segments()
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
