"""Weight pulls of the replicas that follow a trained model."""

import asyncio
from typing import Protocol

from streamrl.planner.problem.stage_timings import WeightsTiming
from streamrl.planner.simulator.replicas.recorder import ProcessRecorder
from streamrl.stream.protocols import DeviceLease
from streamrl.weights import WeightManifest
from streamrl.weights.versions import WeightRegistry


class SimulatedWeightRegistry(WeightRegistry):
    """Weight registry that notifies followers of a new version; real followers poll."""

    def __init__(self) -> None:
        super().__init__(keep_versions=2)
        self.followers: list[WeightPuller] = []

    def add_manifest(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        super().add_manifest(manifest, publish_s=publish_s)
        for follower in self.followers:
            follower.pull_if_newer()


class VersionFollower(Protocol):
    """Protocol of a simulated replica with a copy of a trained model."""

    async def load_version(self, version: int, pause_s: float) -> None:
        """Simulate loading a version of the weights: compute nothing for `pause_s`."""
        ...

    def on_version_loaded(self) -> None: ...


class WeightPuller:
    """Pulls of weights by a single replica: one pull at a time, always of the newest version.

    loaded_version: version in the replica; -1 before the first pull.
    """

    def __init__(
        self,
        follower: VersionFollower,
        timing: WeightsTiming,
        registry: SimulatedWeightRegistry,
        lease: DeviceLease,
        recorder: ProcessRecorder,
    ) -> None:
        self.loaded_version = -1
        self._follower = follower
        self._timing = timing
        self._registry = registry
        self._lease = lease
        self._recorder = recorder
        self._pull_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._registry.followers.append(self)
        self.pull_if_newer()

    def pull_if_newer(self) -> None:
        """Start a pull if the registry has a newer version of the weights and no pull is
        running."""
        if self._pull_task is None and self._registry.version > self.loaded_version:
            self._pull_task = asyncio.create_task(self._pull_newest())

    def close(self) -> None:
        self._registry.followers.remove(self)
        if self._pull_task is not None:
            self._pull_task.cancel()

    async def _pull_newest(self) -> None:
        timing = self._timing
        while (version := self._registry.version) > self.loaded_version:
            lane = self._recorder.begin_span("pull", {"version": version})
            await asyncio.sleep(max(0.0, timing.pull_s - timing.pause_s))
            async with self._lease.hold("load"):
                await self._follower.load_version(version, timing.pause_s)
            self.loaded_version = version
            self._recorder.end_span(lane)
            self._follower.on_version_loaded()
        self._pull_task = None
