"""Registry of versions: the newest version, the version each reader serves, and sync statistics."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.errors import WeightsError
from streamrl.weights.broadcast_tree import BroadcastTree
from streamrl.weights.manifest import WeightManifest
from streamrl.weights.metrics import PullStats, SyncStats

PULL_POLL_S = 0.01
LOAD_REFUSED = "weights_refused"
FALLBACK_USED = "weights_detour"
NOT_LOADED = "weights_not_loaded"


@dataclass(frozen=True)
class WeightFault:
    """Version that a reader could not load as intended, and the reason."""

    version: int
    reason: str


@dataclass(frozen=True)
class ReaderState:
    """State that a reader reports: the version it serves and its node.

    pull, fault: statistics of the last pull and reason of the last failed pull, each reported once.
    """

    version: int
    pull: PullStats | None = None
    fault: WeightFault | None = None
    node: str = ""


class WeightRegistry:
    """Rendezvous of a model's publisher and readers; holds manifests, never weights.

    The last `keep_versions` manifests stay, so that a reader in the middle of a pull keeps its
    buckets when the next version arrives.
    """

    def __init__(
        self,
        *,
        keep_versions: int,
        on_fault: Callable[[str, str, WeightFault], None] = lambda kind, reader, fault: None,
        broadcast_tree: BroadcastTree | None = None,
    ) -> None:
        """Create a registry.

        `on_fault(kind, reader, fault)` is called for every failed pull (kind LOAD_REFUSED), every
        pull through the fallback transport (FALLBACK_USED), and weights that an engine did not load
        (NOT_LOADED). `broadcast_tree` limits which nodes pull at a time.
        """
        self._keep_versions = keep_versions
        self._on_fault = on_fault
        self._broadcast_tree = broadcast_tree
        self._manifests: list[WeightManifest] = []
        self._version_published = asyncio.Event()
        self._reader_versions: dict[str, int] = {}
        self._publish_durations_s: list[float] = []
        self._pulls: list[PullStats] = []
        self._num_faults = 0

    @property
    def version(self) -> int:
        """Newest published version; -1 before the first."""
        return self._manifests[-1].version if self._manifests else -1

    @property
    def readers(self) -> list[str]:
        """Names of all current readers, sorted."""
        return sorted(self._reader_versions)

    def add_manifest(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        """Add a published version, or replace the newest one if it was published again.

        Raises WeightsError if the version is older than the newest.
        """
        if manifest.version < self.version:
            raise WeightsError(f"version {manifest.version} was published after {self.version}")
        older = [m for m in self._manifests if m.version < manifest.version]
        self._manifests = [*older, manifest][-self._keep_versions :]
        self._publish_durations_s.append(publish_s)
        self._version_published.set()

    def count_fault(self) -> None:
        """Count a failed publish that will be retried, for the metrics."""
        self._num_faults += 1

    async def wait_for_newer(
        self, reader: str, state: ReaderState, *, wait_s: float
    ) -> WeightManifest | None:
        """Wait up to `wait_s` for a version newer than the reader's; return its manifest or None.

        Records `state`, the reader's report, for the statistics first. The broadcast tree may delay
        the pull.
        """
        self._record_state(reader, state)
        try:
            async with asyncio.timeout(wait_s):
                while self.version <= state.version:
                    self._version_published.clear()
                    await self._version_published.wait()
                while not self._try_start_pull(state.node):
                    await asyncio.sleep(PULL_POLL_S)
        except TimeoutError:
            return None
        return self._manifests[-1]

    def _try_start_pull(self, node: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._broadcast_tree is None or self._broadcast_tree.try_start_pull(
            node, self.version, now_s
        )

    def remove_reader(self, reader: str) -> None:
        """Forget a reader that left, so that the version lag no longer includes it."""
        self._reader_versions.pop(reader, None)

    def _record_state(self, reader: str, state: ReaderState) -> None:
        """Record a reader's version and pull, report its faults, and update the broadcast tree."""
        self._reader_versions[reader] = state.version
        if state.pull is not None:
            self._pulls.append(state.pull)
            if state.pull.fallback_reason:
                self._on_fault(
                    FALLBACK_USED, reader, WeightFault(state.version, state.pull.fallback_reason)
                )
            for warning in state.pull.warnings:
                self._on_fault(NOT_LOADED, reader, WeightFault(state.version, warning))
        if state.fault is not None:
            self._num_faults += 1
            self._on_fault(LOAD_REFUSED, reader, state.fault)
        if self._broadcast_tree is not None and state.fault is not None:
            self._broadcast_tree.remove_node(state.node)
        elif self._broadcast_tree is not None:
            self._broadcast_tree.mark_pulled(state.node, state.version)

    def drain_stats(self) -> SyncStats:
        """Return the statistics of publishes and pulls since the last call."""
        pulls, self._pulls = self._pulls, []
        publish_s = max(self._publish_durations_s, default=math.nan)
        self._publish_durations_s = []
        served_versions = [version for version in self._reader_versions.values() if version >= 0]
        max_version_lag = self.version - min(served_versions, default=self.version)
        return SyncStats(pulls, publish_s, max_version_lag, self._num_faults)
