"""Which version is the newest, who holds which, and what it took to get there."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.errors import WeightsError
from streamrl.weights.broadcast_tree import Spread
from streamrl.weights.manifest import WeightManifest
from streamrl.weights.metrics import Pull, Traffic

TURN_S = 0.01
"""How often a reader whose turn has not come looks again, s."""


REFUSED = "weights_refused"
DETOUR = "weights_detour"
NOT_LOADED = "weights_not_loaded"


@dataclass(frozen=True)
class Fault:
    """Why a reader could not take up a version it was given."""

    version: int
    reason: str


@dataclass(frozen=True)
class ReaderState:
    """What a reader says of itself: the version it serves, and on what node it is.

    With it come, each told once, what it took to serve that version and the last try that failed.
    """

    version: int
    pull: Pull | None = None
    fault: Fault | None = None
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
        on_trouble: Callable[[str, str, Fault], None] = lambda kind, reader, fault: None,
        spread: Spread | None = None,
    ) -> None:
        """`on_trouble` is told of every pull that failed (REFUSED) or took another way (DETOUR),
        and of weights that an engine says it did not load (NOT_LOADED).

        `spread` says which nodes may pull at a time, where that matters.
        """
        self._keep_versions = keep_versions
        self._on_trouble = on_trouble
        self._spread = spread
        self._manifests: list[WeightManifest] = []
        self._published = asyncio.Event()
        self._held: dict[str, int] = {}
        self._published_s: list[float] = []
        self._pulls: list[Pull] = []
        self._num_faults = 0

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return self._manifests[-1].version if self._manifests else -1

    @property
    def readers(self) -> list[str]:
        """Those who have asked for a version, sorted."""
        return sorted(self._held)

    def offer(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        """A version was published, for the first time or, if it is the newest, once more.

        Raises WeightsError if it is older than the newest.
        """
        if manifest.version < self.version:
            raise WeightsError(f"version {manifest.version} was published after {self.version}")
        others = [one for one in self._manifests if one.version < manifest.version]
        self._manifests = [*others, manifest][-self._keep_versions :]
        self._published_s.append(publish_s)
        self._published.set()

    def count_fault(self) -> None:
        """A publish failed and is tried again."""
        self._num_faults += 1

    async def newest(
        self, reader: str, held: ReaderState, *, wait_s: float
    ) -> WeightManifest | None:
        """The newest manifest if it is newer than what `reader` holds, waiting up to `wait_s`."""
        self._note(reader, held)
        try:
            async with asyncio.timeout(wait_s):
                while self.version <= held.version:
                    self._published.clear()
                    await self._published.wait()
                while not self._may_pull(held.node):
                    await asyncio.sleep(TURN_S)
        except TimeoutError:
            return None
        return self._manifests[-1]

    def _may_pull(self, node: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._spread is None or self._spread.may_pull(node, self.version, now_s)

    def forget(self, reader: str) -> None:
        """The reader has left: it counts as behind no more."""
        self._held.pop(reader, None)

    def _note(self, reader: str, held: ReaderState) -> None:
        self._held[reader] = held.version
        if held.pull is not None:
            self._pulls.append(held.pull)
            if held.pull.detour:
                self._on_trouble(DETOUR, reader, Fault(held.version, held.pull.detour))
            for warning in held.pull.warnings:
                self._on_trouble(NOT_LOADED, reader, Fault(held.version, warning))
        if held.fault is not None:
            self._num_faults += 1
            self._on_trouble(REFUSED, reader, held.fault)
        if self._spread is not None and held.fault is not None:
            self._spread.forget(held.node)
        elif self._spread is not None:
            self._spread.done(held.node, held.version)

    def drain(self) -> Traffic:
        """What went on since the last call."""
        pulls, self._pulls = self._pulls, []
        publish_s = max(self._published_s, default=math.nan)
        self._published_s = []
        served = [version for version in self._held.values() if version >= 0]
        skew = self.version - min(served, default=self.version)
        return Traffic(pulls, publish_s, skew, self._num_faults)
