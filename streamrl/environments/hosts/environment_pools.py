"""Host pools of all environments of a run; a prompt's environment decides which one serves it."""

import asyncio
from collections.abc import Mapping

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.host_pool import EnvironmentHostPool, HostedSession
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.messages import Prompt


class EnvironmentPools:
    """A pool of host processes per environment (`EnvironmentHosts`)."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._pools = {name: EnvironmentHostPool(config.select(name)) for name in config.specs}

    async def start(self) -> None:
        """Start all pools at the same time.

        Raises ConfigError if a class cannot be used, and EpisodeError if a process does not start;
        then all pools are closed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for pool in self._pools.values():
                    tasks.create_task(pool.start())
        except ExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None

    @property
    def descriptions(self) -> Mapping[str, EnvironmentDescription]:
        """Description of each environment by name."""
        return {name: pool.description for name, pool in self._pools.items()}

    def open_session(self, prompt: Prompt, *, seed: int) -> HostedSession:
        return self._pools[prompt.environment].open_session(prompt, seed=seed)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
