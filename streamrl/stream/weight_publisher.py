"""Publish versions to followers while the next step is training."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from streamrl.dataflow import EMA_REFERENCE, POLICY
from streamrl.engines.trainer_config import ReferenceConfig
from streamrl.errors import WeightsError
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import DeviceLease
from streamrl.weights import WeightManifest
from streamrl.weights.rank_slices import Readers
from streamrl.weights.transport import estimate_send_s
from streamrl.weights.versions import WeightFault, WeightRegistry

PUBLISH_ATTEMPTS = 5
"""Consecutive failed attempts to publish a version before the run ends."""
RETRY_S = 0.5
"""Delay before the first retry, s; doubles with each retry."""


PublishFunction = Callable[[int, Readers], Awaitable[WeightManifest]]
"""Publishes the current model as a version, to these followers.

In a run it is `publish_weights` of the role's TrainerGroup. Raises WeightsError on failure; a
retry may succeed.
"""


def is_publish_due(
    role: str, version: int, *, every: int, reference: ReferenceConfig, forced: bool
) -> bool:
    """Return True if a version of a role's model is published to its followers.

    A trained model is published every `every` versions, and whenever `forced`; an EMA reference
    only by its own schedule.
    """
    if role == EMA_REFERENCE:
        return reference.is_updated_at(version)
    return version % every == 0 or forced


class WeightPublisher:
    """Publishes the weights of trained models to their followers, in the background.

    A version is read from the model while the next step starts. Parameters must not change
    meanwhile, so callers await `wait_until_published` before an update. A failed publish, for
    example on a full disk, is retried up to PUBLISH_ATTEMPTS attempts.
    """

    def __init__(
        self,
        sources: Mapping[str, PublishFunction],
        registries: Mapping[str, WeightRegistry],
        *,
        due: Callable[[str, int], bool] = lambda role, version: True,
        lease: DeviceLease | None = None,
        on_fault: Callable[[str, WeightFault], None] = lambda role, fault: None,
    ) -> None:
        """Create a publisher.

        sources: functions that publish a model, by role.
        registries: published versions and followers by role.
        due(role, version): whether followers of a role get a version or keep the last one.
        lease: the trainers' device lease, held to read a model; None if reading needs none.
        on_fault(role, fault): called for every failed attempt.
        """
        self._sources = sources
        self.registries = registries
        self._is_due = due
        self._lease = lease or DedicatedDeviceLease()
        self._on_fault = on_fault
        self._publish_tasks: dict[str, asyncio.Task[None]] = {}
        self._sending_roles: set[str] = set()
        self._version = -1
        self._changed_roles: set[str] = set()

    async def begin_publish(
        self, version: int, *, first: bool = False, awaited: bool = False
    ) -> bool:
        """Start publishing the current models as `version`, once the previous version is out.

        The caller may release the devices after the return: this publisher holds its lease by then.
        Without a lease, as where a generator shares the trainer's memory, nothing needs the devices
        to stay: that generator is paused until it loads the version.
        `first` publishes all roles; `awaited` publishes a version that is not due, for example
        because groups admitted at it before a resume wait for it. Returns True if the version is
        announced: publishing the policy has begun, or nobody follows it.
        """
        await self.wait_until_published()
        self._version = version
        self._changed_roles.clear()
        # Publishing moves an EMA reference, so `awaited` must not publish it off schedule.
        forced = {role for role in self._sources if awaited and role != EMA_REFERENCE}
        roles = [r for r in self._sources if first or r in forced or self._is_due(r, version)]
        self._publish_tasks = {
            role: asyncio.create_task(self._publish_role(role, version)) for role in roles
        }
        # Let each task run until it holds the device lease, if that is free.
        await asyncio.sleep(0)
        return POLICY in roles or POLICY not in self._sources

    def resend_version(self, role: str, version: int) -> None:
        """Publish a role's newest version again, for followers that could not verify it.

        Does nothing if the model has changed since. Followers that serve the version already are
        not affected.
        """
        source = POLICY if role == EMA_REFERENCE else role
        is_newest = version == self._version == self.registries[role].version
        if is_newest and source not in self._changed_roles and self._publish_tasks[role].done():
            self._publish_tasks[role] = asyncio.create_task(self._publish_role(role, version))

    def mark_changed(self, role: str) -> None:
        """Record that a role's model is about to be updated; its last version cannot be resent."""
        self._changed_roles.add(role)

    async def _publish_role(self, role: str, version: int) -> None:
        """Publish the model of one role, with retries, and register its manifest."""
        started = time.perf_counter()
        registry, failures = self.registries[role], 0
        while True:
            try:
                async with self._lease.hold("publish"):
                    self._sending_roles.add(role)
                    manifest = await self._sources[role](version, registry.followers)
                break
            except WeightsError as error:
                failures += 1
                registry.count_fault()
                if failures == PUBLISH_ATTEMPTS:
                    raise
                self._on_fault(role, WeightFault(version, str(error)))
            finally:
                self._sending_roles.discard(role)
            await asyncio.sleep(RETRY_S * 2 ** (failures - 1))
        registry.add_manifest(manifest, publish_s=time.perf_counter() - started)

    @property
    def is_publishing(self) -> bool:
        return not all(task.done() for task in self._publish_tasks.values())

    @property
    def is_moving_weights(self) -> bool:
        """A model is being sent, or a follower loads one, for no longer than its bytes may take."""
        now = asyncio.get_running_loop().time()
        loads = (load for registry in self.registries.values() for load in registry.loads.values())
        return bool(self._sending_roles) or any(
            now < begun_at + estimate_send_s(manifest.num_bytes) for manifest, begun_at in loads
        )

    async def wait_until_published(self) -> None:
        """Wait until followers can fetch every version that is being published.

        Raises the error of a failed publish. The trainers' deadlines bound the wait.
        """
        tasks: list[asyncio.Task[None]] = []
        # resend_version may start another task meanwhile.
        while tasks != list(self._publish_tasks.values()):
            tasks = list(self._publish_tasks.values())
            await asyncio.gather(*tasks)

    def check_failures(self) -> None:
        """Raise the error of a failed publish, so that no follower waits in vain."""
        for task in self._publish_tasks.values():
            if task.done() and not task.cancelled():
                task.result()
