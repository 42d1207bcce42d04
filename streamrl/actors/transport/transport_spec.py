"""Transport of a run's weights: the decision, and the parameters of its writers and readers."""

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
"""Longest wait for killed publishers to exit; the next publisher removes the segments otherwise."""


@dataclass(frozen=True)
class TransportSpec:
    """Given to every actor; see `make_transport_writer` and `make_transport_reader`.

    token: distinguishes the shared memory of this run on the machine.
    max_bytes: shared memory of each published role, bytes.
    node: node id that all publishers and followers must share; empty if any node will do.
    """

    decision: TransportDecision
    token: str
    run_dir: Path
    keep_versions: int
    max_bytes: Mapping[str, int]
    node: str = ""

    def make_broadcast_tree(self, origin: str) -> BroadcastTree | None:
        """Make the broadcast tree rooted at node `origin`; None if nodes keep no copies."""
        return BroadcastTree(origin) if self.decision.transport in (OBJECT_STORE, DELTA) else None

    def clean_up(self) -> None:
        """Remove shared-memory segments left by killed publishers."""
        if self.decision.transport != SHARED_MEMORY:
            return
        deadline = time.monotonic() + CLEANUP_TIMEOUT_S
        # A segment counts as stale only after its publisher has exited, which may take a moment.
        while any(SHARED_MEMORY_DIR.glob(f"{SEGMENT_PREFIX}{self.token}*")):
            remove_stale_segments()
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
