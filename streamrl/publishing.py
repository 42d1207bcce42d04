"""Versions on their way out of the trainers, beside the step that follows them."""

import asyncio
import time
from collections.abc import Mapping

from streamrl.faces import Trainer
from streamrl.weights.registry import WeightRegistry


class Publishing:
    """Publishes what the trainers have made, and offers it to those who follow; by role.

    A version is packed while the next step begins. What must not change meanwhile, the parameters,
    is left alone by whoever calls `settle` before an update.
    """

    def __init__(
        self, trainers: Mapping[str, Trainer], registries: Mapping[str, WeightRegistry]
    ) -> None:
        self._trainers = trainers
        self.registries = registries
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def begin(self, version: int) -> None:
        """Publish the models as they are now as `version`, once the version before is out."""
        await self.settle()
        self._under_way = {
            role: asyncio.create_task(self._publish(role, version)) for role in self._trainers
        }

    async def _publish(self, role: str, version: int) -> None:
        started = time.perf_counter()
        manifest = await self._trainers[role].publish(version)
        self.registries[role].offer(manifest, publish_s=time.perf_counter() - started)

    async def settle(self, role: str | None = None) -> None:
        """Wait until what was begun, of one role or of all, is offered; raises what it failed of.

        The trainers' own deadlines bound the wait.
        """
        wanted = [task for name, task in self._under_way.items() if role in (None, name)]
        await asyncio.gather(*wanted)

    def check(self) -> None:
        """Raise what has failed so far: those who wait for a version would wait in vain."""
        for task in self._under_way.values():
            if task.done() and not task.cancelled():
                task.result()
