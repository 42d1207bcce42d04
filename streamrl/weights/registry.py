"""Which version is the newest, who holds which, and what it took to get there."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.errors import WeightsError
from streamrl.weights.manifest import WeightManifest
from streamrl.weights.spread import Spread

TURN_S = 0.01
"""How often a reader whose turn has not come looks again, s."""


@dataclass(frozen=True)
class Pull:
    """What it took a reader to serve a version.

    pull_s: from the news of it until it is held, s. pause_s: while nothing was sampled, s.
    num_bytes: that travelled. interrupted: rollouts that ran at that moment. probe_diff: largest
    difference of a log-probability from the trainer's; NaN if none was looked at. detour: why it
    did not come the way it should have.
    """

    pull_s: float = 0.0
    pause_s: float = 0.0
    num_bytes: int = 0
    interrupted: int = 0
    probe_diff: float = math.nan
    detour: str = ""


@dataclass(frozen=True)
class Held:
    """What a reader says of itself: the version it serves, how it came by it, what is in its way.

    `fault` is why the version it was given last could not be taken, once for each try. `node` is
    where it is.
    """

    version: int
    pull: Pull | None = None
    fault: str = ""
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
        on_fault: Callable[[str, int, str], None] = lambda reader, version, fault: None,
        spread: Spread | None = None,
    ) -> None:
        """`on_fault` is told reader, version and reason of every pull that failed.

        `spread` says which nodes may pull at a time, where that matters.
        """
        self._keep_versions = keep_versions
        self._on_fault = on_fault
        self._spread = spread
        self._manifests: list[WeightManifest] = []
        self._published = asyncio.Event()
        self._held: dict[str, int] = {}
        self._publish_s = math.nan
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
        """A version was published. Raises WeightsError if it is not newer than the last."""
        if manifest.version <= self.version:
            raise WeightsError(f"version {manifest.version} was published after {self.version}")
        self._manifests = [*self._manifests, manifest][-self._keep_versions :]
        self._publish_s = publish_s
        self._published.set()

    async def newest(self, reader: str, held: Held, *, wait_s: float) -> WeightManifest | None:
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

    def _note(self, reader: str, held: Held) -> None:
        if held.fault:
            self._num_faults += 1
            self._on_fault(reader, self.version, held.fault)
        if held.pull is not None and held.version != self._held.get(reader):
            self._pulls.append(held.pull)
            if held.pull.detour:
                self._on_fault(reader, held.version, held.pull.detour)
        self._held[reader] = held.version
        if self._spread is not None and held.fault:
            self._spread.forget(held.node)
        elif self._spread is not None:
            self._spread.done(held.node, held.version)

    def drain_metrics(self) -> dict[str, float]:
        """weights/* since the last call, of the last publish; NaN where nothing was measured."""
        pulls, self._pulls = self._pulls, []
        seconds = sum(pull.pull_s for pull in pulls)
        moved = sum(pull.num_bytes for pull in pulls)
        probed = [pull.probe_diff for pull in pulls if not math.isnan(pull.probe_diff)]
        return {
            "weights/skew_max": self.version - min(self._held.values(), default=self.version),
            "weights/publish_s": self._publish_s,
            "weights/pull_s": max((pull.pull_s for pull in pulls), default=0.0),
            "weights/pause_s": max((pull.pause_s for pull in pulls), default=0.0),
            "weights/bytes": moved,
            "weights/bytes_per_s": moved / seconds if seconds else math.nan,
            "weights/interrupted": sum(pull.interrupted for pull in pulls),
            "weights/probe_diff": max(probed, default=math.nan),
            "weights/faults": self._num_faults,
        }
