"""Versions on their way out of the trainers, beside the step that follows them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from streamrl.dataflow import POLICY
from streamrl.weights import WeightManifest
from streamrl.weights.registry import WeightRegistry


class Source(Protocol):
    """Has a model to publish: a trainer, as a rule."""

    async def publish(self, version: int, readers: Sequence[str]) -> WeightManifest: ...


class Publishing:
    """Publishes what was trained, and offers it to those who follow; by role.

    A version is packed while the next step begins. What must not change meanwhile, the parameters,
    is left alone by whoever calls `settle` before an update.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        registries: Mapping[str, WeightRegistry],
        *,
        due: Callable[[str, int], bool] = lambda role, version: True,
    ) -> None:
        """`due` is whether those who follow a role get a version, or go on with the last one."""
        self._sources = sources
        self.registries = registries
        self._due = due
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def begin(self, version: int, *, first: bool = False) -> bool:
        """Publish the models as they are now as `version`, once the version before is out.

        Whether the policy is among them; at first all are.
        """
        await self.settle()
        roles = [role for role in self._sources if first or self._due(role, version)]
        self._under_way = {
            role: asyncio.create_task(self._publish(role, version)) for role in roles
        }
        return POLICY in roles

    async def _publish(self, role: str, version: int) -> None:
        started = time.perf_counter()
        registry = self.registries[role]
        manifest = await self._sources[role].publish(version, registry.readers)
        registry.offer(manifest, publish_s=time.perf_counter() - started)

    async def settle(self) -> None:
        """Wait until all that was begun is offered; raises what it failed of.

        The trainers' own deadlines bound the wait.
        """
        await asyncio.gather(*self._under_way.values())

    def check(self) -> None:
        """Raise what has failed so far: those who wait for a version would wait in vain."""
        for task in self._under_way.values():
            if task.done() and not task.cancelled():
                task.result()
