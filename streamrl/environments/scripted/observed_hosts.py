"""Hosts that show an observer each answer of the environment, for a terminal or a record."""

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from streamrl.environments.hosts.host_pool import EnvironmentHostPool, HostedSession
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.environments.interface import EnvironmentStep, EpisodeSummary, Reply, ResetResult
from streamrl.messages import Prompt


class EpisodeObserver(Protocol):
    """Observer of an episode. seconds: time that the environment took."""

    def see_reset(self, prompt: Prompt, start: ResetResult, seconds: float) -> None: ...

    def see_step(self, reply: Reply, step: EnvironmentStep, seconds: float) -> None: ...

    def see_score(self, episode: EpisodeSummary, score: float, seconds: float) -> None: ...


class ObservedHosts:
    """Pool whose sessions report to an observer (`EnvironmentHosts`); one episode at a time.

    observer: receives what the sessions that are opened next answer. before_close: runs before a
    session is closed.
    session: the session that was opened last.
    """

    def __init__(
        self,
        hosts: EnvironmentHostPool,
        observer: EpisodeObserver,
        before_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._hosts = hosts
        self._observer = observer
        self._before_close = before_close
        self.session: HostedSession | None = None

    def open_session(self, prompt: Prompt, *, seed: int) -> "ObservedSession":
        self.session = self._hosts.open_session(prompt, seed=seed)
        return ObservedSession(self.session, prompt, self._observer, self._before_close)

    @property
    def description(self) -> EnvironmentDescription:
        return self._hosts.description

    async def close(self) -> None:
        await self._hosts.close()


class ObservedSession:
    """Session that reports its answers to an observer (`EnvironmentSession`)."""

    def __init__(
        self,
        session: HostedSession,
        prompt: Prompt,
        observer: EpisodeObserver,
        before_close: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._before_close = before_close
        self._session = session
        self._prompt = prompt
        self._observer = observer

    async def reset(self) -> ResetResult:
        started = time.monotonic()
        start = await self._session.reset()
        self._observer.see_reset(self._prompt, start, time.monotonic() - started)
        return start

    async def step(self, reply: Reply) -> EnvironmentStep:
        started = time.monotonic()
        step = await self._session.step(reply)
        self._observer.see_step(reply, step, time.monotonic() - started)
        return step

    async def score(self, episode: EpisodeSummary) -> float:
        started = time.monotonic()
        score = await self._session.score(episode)
        self._observer.see_score(episode, score, time.monotonic() - started)
        return score

    async def close(self) -> None:
        try:
            if self._before_close is not None:
                await self._before_close()
        finally:
            await self._session.close()
