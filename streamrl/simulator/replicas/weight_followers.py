"""Versions on their way to the replicas that follow a model."""

import asyncio
from typing import Protocol

from streamrl.placement.stage_timings import WeightsTiming
from streamrl.simulator.replicas.recorder import Recorder
from streamrl.stream.protocols import DeviceLease
from streamrl.weights import WeightManifest
from streamrl.weights.version_registry import WeightRegistry


class Versions(WeightRegistry):
    """A registry that calls those who follow, where real ones ask it."""

    def __init__(self) -> None:
        super().__init__(keep_versions=2)
        self.followers: list[Following] = []

    def offer(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        """As any registry."""
        super().offer(manifest, publish_s=publish_s)
        for follower in self.followers:
            follower.look()


class Follower(Protocol):
    """A replica that holds a model which another trains."""

    async def load(self, version: int, pause_s: float) -> None:
        """Go over to a version that is there, computing nothing meanwhile."""
        ...

    def arrived(self) -> None:
        """It is held."""
        ...


class Following:
    """A replica's pulls, one after the other, each of the newest version. None is held at first."""

    def __init__(
        self,
        follower: Follower,
        timing: WeightsTiming,
        versions: Versions,
        lease: DeviceLease,
        recorder: Recorder,
    ) -> None:
        self.held = -1
        self._follower = follower
        self._timing = timing
        self._versions = versions
        self._lease = lease
        self._recorder = recorder
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow from now on."""
        self._versions.followers.append(self)
        self.look()

    def look(self) -> None:
        """There may be a newer version."""
        if self._task is None and self._versions.version > self.held:
            self._task = asyncio.create_task(self._pull())

    def close(self) -> None:
        """The replica is no more."""
        self._versions.followers.remove(self)
        if self._task is not None:
            self._task.cancel()

    async def _pull(self) -> None:
        timing = self._timing
        while (version := self._versions.version) > self.held:
            lane = self._recorder.begin("pull", {"version": version})
            await asyncio.sleep(max(0.0, timing.pull_s - timing.pause_s))
            async with self._lease.hold("load"):
                await self._follower.load(version, timing.pause_s)
            self.held = version
            self._recorder.end(lane)
            self._follower.arrived()
        self._task = None
