"""Pool of a single episode at a time whose answers an observer receives."""

from dataclasses import dataclass

from streamrl.environments.hosts.host_pool import (
    EnvironmentHostPool,
    EpisodeObserver,
    HostedSession,
)
from streamrl.messages import Prompt


@dataclass
class ObservedHosts:
    """Pool whose sessions have an observer (`EnvironmentHosts`).

    is_watched: see HostedSession. session: the session that was opened last.
    """

    pool: EnvironmentHostPool
    observer: EpisodeObserver
    is_watched: bool = False
    session: HostedSession | None = None

    def open_session(self, prompt: Prompt, *, seed: int) -> HostedSession:
        self.session = self.pool.open_session(prompt, seed=seed)
        self.session.observer, self.session.is_watched = self.observer, self.is_watched
        return self.session

    async def close(self) -> None:
        await self.pool.close()
