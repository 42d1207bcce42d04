"""Users' environments in this process, with the messages of a host process."""

import itertools
from typing import Any

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.environment_host import EnvironmentHost
from streamrl.environments.hosts.host_protocol import HostOperation, HostRequest, HostResponse
from streamrl.environments.interface import EnvironmentStep, EpisodeSummary, Reply, ResetResult
from streamrl.errors import EpisodeError
from streamrl.messages import Prompt
from streamrl.user_code.pool.process import unpickle_response
from streamrl.user_code.pool.worker import HEADER, pack_message


class InProcessHosts:
    """Hosts without a process: the handler of a host, called directly."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._host = EnvironmentHost(config)
        self._ids = itertools.count()

    def open_session(self, prompt: Prompt, *, seed: int) -> "InProcessSession":
        return InProcessSession(self._host, next(self._ids), prompt, seed)

    async def close(self) -> None:
        pass


class InProcessSession:
    """Session whose results pass through the pool's wire format."""

    def __init__(self, host: EnvironmentHost, session_id: int, prompt: Prompt, seed: int) -> None:
        self._host = host
        self._id = session_id
        self._prompt = prompt
        self._seed = seed

    async def reset(self) -> ResetResult:
        result: ResetResult = await self._send(HostOperation.RESET, self._prompt, self._seed)
        return result

    async def step(self, reply: Reply) -> EnvironmentStep:
        result: EnvironmentStep = await self._send(HostOperation.STEP, reply)
        return result

    async def score(self, episode: EpisodeSummary) -> float:
        score: float = await self._send(HostOperation.SCORE, episode)
        return score

    async def close(self) -> None:
        await self._send(HostOperation.CLOSE)

    async def _send(self, operation: HostOperation, *arguments: Any) -> Any:
        response = await self._host(HostRequest(operation, self._id, arguments))
        received: HostResponse = unpickle_response(pack_message(response)[HEADER.size :])
        if received.error:
            raise EpisodeError(received.error)
        return received.result
