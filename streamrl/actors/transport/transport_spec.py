"""Weight transport of a run: the decision, and the settings of its writers and readers."""

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
"""Longest wait for killed publishers to exit; the next publisher removes the rest."""


@dataclass(frozen=True)
class TransportSpec:
    """Settings from which every actor makes its transport writers and readers.

    token: distinguishes the shared memory of this run on the machine.
    keep_versions: versions that a writer keeps for slow followers.
    max_bytes: limit of shared memory by published role, bytes.
    node: node id that all publishers and followers must share; empty if any node will do.
    """

    decision: TransportDecision
    token: str
    run_dir: Path
    keep_versions: int
    max_bytes: Mapping[str, int]
    node: str = ""

    def make_broadcast_tree(self, origin: str) -> BroadcastTree | None:
        """Make the tree along which nodes pass on a version; None if nodes keep no copies.

        origin: node id of the publisher.
        """
        return BroadcastTree(origin) if self.decision.transport in (OBJECT_STORE, DELTA) else None

    def clean_up(self) -> None:
        """Remove the shared-memory segments of this run that killed publishers left."""
        if self.decision.transport != SHARED_MEMORY:
            return
        deadline = time.monotonic() + CLEANUP_TIMEOUT_S
        # A segment counts as stale only after its publisher has exited, which may take a moment.
        while any(SHARED_MEMORY_DIR.glob(f"{SEGMENT_PREFIX}{self.token}*")):
            remove_stale_segments()
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
