"""Which version is the newest, and which one each reader holds."""

import asyncio
from dataclasses import dataclass

from streamrl.errors import WeightsError
from streamrl.weights.manifest import WeightManifest


@dataclass(frozen=True)
class Held:
    """The version a reader serves, and the seconds it took to pull it."""

    version: int
    pull_s: float = 0.0


class WeightRegistry:
    """The meeting point of publisher and readers: manifests only, never weights.

    The last `keep_versions` manifests are held, so that a reader half way through a pull is not
    left without its buckets when the next version comes.
    """

    def __init__(self, *, keep_versions: int) -> None:
        self._keep_versions = keep_versions
        self._manifests: list[WeightManifest] = []
        self._published = asyncio.Event()
        self._held: dict[str, int] = {}
        self._pull_s: list[float] = []
        self._moved_bytes = 0

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return self._manifests[-1].version if self._manifests else -1

    def offer(self, manifest: WeightManifest) -> None:
        """A version was published. Raises WeightsError if it is not newer than the last."""
        if manifest.version <= self.version:
            raise WeightsError(f"version {manifest.version} was published after {self.version}")
        self._manifests = [*self._manifests, manifest][-self._keep_versions :]
        self._published.set()

    async def newest(self, reader: str, held: "Held", *, wait_s: float) -> WeightManifest | None:
        """The newest manifest if it is newer than what `reader` holds, waiting up to `wait_s`."""
        if held.version > self._held.get(reader, -1):
            self._note_pull(reader, held)
        if self.version <= held.version:
            self._published.clear()
            try:
                await asyncio.wait_for(self._published.wait(), wait_s)
            except TimeoutError:
                return None
        return self._manifests[-1]

    def forget(self, reader: str) -> None:
        """This reader has left."""
        self._held.pop(reader, None)

    def _note_pull(self, reader: str, held: "Held") -> None:
        self._held[reader] = held.version
        self._pull_s.append(held.pull_s)
        self._moved_bytes += sum(m.num_bytes for m in self._manifests if m.version == held.version)

    def drain_metrics(self) -> dict[str, float]:
        """weights/* since the last call: longest pull, bytes moved, skew of the readers."""
        pulls, self._pull_s = self._pull_s, []
        moved, self._moved_bytes = self._moved_bytes, 0
        return {
            "weights/version": self.version,
            "weights/skew_max": self.version - min(self._held.values(), default=self.version),
            "weights/pull_s": max(pulls, default=0.0),
            "weights/bytes": moved,
        }
