"""Which version is the newest, who holds which, and what it took to get there."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.errors import WeightsError
from streamrl.weights.broadcast_tree import BroadcastTree
from streamrl.weights.manifest import WeightManifest
from streamrl.weights.metrics import PullStats, SyncStats

PULL_POLL_S = 0.01
"""How often a reader whose turn has not come looks again, s."""


LOAD_REFUSED = "weights_refused"
FALLBACK_USED = "weights_detour"
NOT_LOADED = "weights_not_loaded"


@dataclass(frozen=True)
class WeightFault:
    """Why a reader could not take up a version it was given."""

    version: int
    reason: str


@dataclass(frozen=True)
class ReaderState:
    """What a reader says of itself: the version it serves, and on what node it is.

    With it come, each told once, what it took to serve that version and the last try that failed.
    """

    version: int
    pull: PullStats | None = None
    fault: WeightFault | None = None
    node: str = ""


class WeightRegistry:
    """The meeting point of publisher and readers: manifests only, never weights.

    The last `keep_versions` manifests are held, so that a reader half way through a pull is not
    left without its buckets when the next version comes.
    """

    def __init__(
        self,
        *,
        keep_versions: int,
        on_trouble: Callable[[str, str, WeightFault], None] = lambda kind, reader, fault: None,
        spread: BroadcastTree | None = None,
    ) -> None:
        """`on_trouble` is told of every pull that failed (REFUSED) or took another way (DETOUR),
        and of weights that an engine says it did not load (NOT_LOADED).

        `spread` says which nodes may pull at a time, where that matters.
        """
        self._keep_versions = keep_versions
        self._on_fault = on_trouble
        self._broadcast_tree = spread
        self._manifests: list[WeightManifest] = []
        self._version_published = asyncio.Event()
        self._reader_versions: dict[str, int] = {}
        self._publish_durations_s: list[float] = []
        self._pulls: list[PullStats] = []
        self._num_faults = 0

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return self._manifests[-1].version if self._manifests else -1

    @property
    def readers(self) -> list[str]:
        """Those who have asked for a version, sorted."""
        return sorted(self._reader_versions)

    def add_manifest(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        """A version was published, for the first time or, if it is the newest, once more.

        Raises WeightsError if it is older than the newest.
        """
        if manifest.version < self.version:
            raise WeightsError(f"version {manifest.version} was published after {self.version}")
        others = [one for one in self._manifests if one.version < manifest.version]
        self._manifests = [*others, manifest][-self._keep_versions :]
        self._publish_durations_s.append(publish_s)
        self._version_published.set()

    def count_fault(self) -> None:
        """A publish failed and is tried again."""
        self._num_faults += 1

    async def wait_for_newer(
        self, reader: str, held: ReaderState, *, wait_s: float
    ) -> WeightManifest | None:
        """The newest manifest if it is newer than what `reader` holds, waiting up to `wait_s`."""
        self._record_state(reader, held)
        try:
            async with asyncio.timeout(wait_s):
                while self.version <= held.version:
                    self._version_published.clear()
                    await self._version_published.wait()
                while not self._try_start_pull(held.node):
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
        """The reader has left: it counts as behind no more."""
        self._reader_versions.pop(reader, None)

    def _record_state(self, reader: str, held: ReaderState) -> None:
        self._reader_versions[reader] = held.version
        if held.pull is not None:
            self._pulls.append(held.pull)
            if held.pull.fallback_reason:
                self._on_fault(
                    FALLBACK_USED, reader, WeightFault(held.version, held.pull.fallback_reason)
                )
            for warning in held.pull.warnings:
                self._on_fault(NOT_LOADED, reader, WeightFault(held.version, warning))
        if held.fault is not None:
            self._num_faults += 1
            self._on_fault(LOAD_REFUSED, reader, held.fault)
        if self._broadcast_tree is not None and held.fault is not None:
            self._broadcast_tree.remove_node(held.node)
        elif self._broadcast_tree is not None:
            self._broadcast_tree.mark_pulled(held.node, held.version)

    def drain_stats(self) -> SyncStats:
        """What went on since the last call."""
        pulls, self._pulls = self._pulls, []
        publish_s = max(self._publish_durations_s, default=math.nan)
        self._publish_durations_s = []
        served = [version for version in self._reader_versions.values() if version >= 0]
        skew = self.version - min(served, default=self.version)
        return SyncStats(pulls, publish_s, skew, self._num_faults)
