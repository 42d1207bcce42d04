"""Versions on their way out of the trainers, beside the step that follows them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from streamrl.dataflow import EMA_REFERENCE, POLICY
from streamrl.engines.reference_config import ReferenceConfig
from streamrl.errors import WeightsError
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import DeviceLease
from streamrl.weights import WeightManifest
from streamrl.weights.version_registry import WeightFault, WeightRegistry

PUBLISH_ATTEMPTS = 5
"""So many times in a row a version is tried to be published before the run ends."""
RETRY_S = 0.5
"""Time before the second try, which is doubled for each one after it, s."""


class WeightSource(Protocol):
    """Has a model to publish: a trainer, as a rule."""

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Send it off as it is. Raises WeightsError if it cannot be sent; asked again, it can."""
        ...


def is_publish_due(
    role: str, version: int, *, every: int, reference: ReferenceConfig, looked_at: bool
) -> bool:
    """Whether those who follow a role get a version: every so many, and what is looked at.

    A reference that moves has a pace of its own.
    """
    if role == EMA_REFERENCE:
        return reference.is_updated_at(version)
    return version % every == 0 or looked_at


class WeightPublisher:
    """Publishes what was trained, and offers it to those who follow; by role.

    A version is packed while the next step begins. What must not change meanwhile, the parameters,
    is left alone by whoever calls `settle` before an update. What cannot be sent, as on a disk that
    is full, is tried again: PUBLISH_ATTEMPTS times in all.
    """

    def __init__(
        self,
        sources: Mapping[str, WeightSource],
        registries: Mapping[str, WeightRegistry],
        *,
        due: Callable[[str, int], bool] = lambda role, version: True,
        lease: DeviceLease | None = None,
        on_fault: Callable[[str, WeightFault], None] = lambda role, fault: None,
    ) -> None:
        """`due` is whether those who follow a role get a version, or go on with the last one.

        `lease` is the trainers', held to read a model. `on_fault` is told of every try that failed.
        """
        self._sources = sources
        self.registries = registries
        self._is_due = due
        self._lease = lease or DedicatedDeviceLease()
        self._on_fault = on_fault
        self._publish_tasks: dict[str, asyncio.Task[None]] = {}
        self._version = -1
        self._changed_roles: set[str] = set()

    async def begin_publish(
        self, version: int, *, first: bool = False, awaited: bool = False
    ) -> bool:
        """Publish the models as they are now as `version`, once the version before is out.

        Whoever has the devices to read them may let go of them then: they are held here as well.
        Returns whether the policy is among those that are published; at first all are. One that is
        `awaited`, as by groups that were admitted at it before a resume, is published whether it is
        due or not.
        """
        await self.wait_until_published()
        self._version = version
        self._changed_roles.clear()
        # A reference moves when it is published, and who follows it knows when that is due.
        asked = {role for role in self._sources if awaited and role != EMA_REFERENCE}
        roles = [r for r in self._sources if first or r in asked or self._is_due(r, version)]
        self._publish_tasks = {
            role: asyncio.create_task(self._publish_role(role, version)) for role in roles
        }
        # Each task comes to where it holds the devices, if they are there.
        await asyncio.sleep(0)
        return POLICY in roles

    def resend_version(self, role: str, version: int) -> None:
        """Those who follow a role cannot verify a version: send it again, if the model still is it.

        Those who hold it already do not hear of that.
        """
        source = POLICY if role == EMA_REFERENCE else role
        is_newest = version == self._version == self.registries[role].version
        if is_newest and source not in self._changed_roles and self._publish_tasks[role].done():
            self._publish_tasks[role] = asyncio.create_task(self._publish_role(role, version))

    def mark_changed(self, role: str) -> None:
        """The model of a role is about to be updated: what was published of it is all there is."""
        self._changed_roles.add(role)

    async def _publish_role(self, role: str, version: int) -> None:
        started = time.perf_counter()
        registry, failures = self.registries[role], 0
        while True:
            try:
                async with self._lease.hold("publish"):
                    manifest = await self._sources[role].publish_weights(version, registry.readers)
                break
            except WeightsError as error:
                failures += 1
                registry.count_fault()
                if failures == PUBLISH_ATTEMPTS:
                    raise
                self._on_fault(role, WeightFault(version, str(error)))
            await asyncio.sleep(RETRY_S * 2 ** (failures - 1))
        registry.add_manifest(manifest, publish_s=time.perf_counter() - started)

    async def wait_until_published(self) -> None:
        """Wait until all that was begun is offered; raises what it failed of.

        The trainers' own deadlines bound the wait.
        """
        tasks: list[asyncio.Task[None]] = []
        # One may be sent again meanwhile.
        while tasks != list(self._publish_tasks.values()):
            tasks = list(self._publish_tasks.values())
            await asyncio.gather(*tasks)

    def check_failures(self) -> None:
        """Raise what has failed so far: those who wait for a version would wait in vain."""
        for task in self._publish_tasks.values():
            if task.done() and not task.cancelled():
                task.result()
