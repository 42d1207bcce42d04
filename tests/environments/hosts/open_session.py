"""Session of a host in this process."""

import asyncio
import itertools

import numpy as np

from streamrl.environments.hosts.host_protocol import HostOperation, HostRequest
from streamrl.environments.interface import EpisodeSummary, Reply
from streamrl.messages import Prompt


class OpenSession:
    """Session of a host, with the requests of a pool as methods."""

    ids = itertools.count()

    def __init__(self, host, row=None):
        self.host, self.id = host, next(self.ids)
        self.row = row or Prompt("u", np.zeros(1, np.int32), ground_truth="391")

    async def send(self, operation, *arguments):
        return await self.host(HostRequest(operation, self.id, arguments))

    async def reset(self, seed=7):
        return await self.send(HostOperation.RESET, self.row, seed)

    async def step(self, text="", *calls):
        return await self.send(HostOperation.STEP, Reply(text, calls))

    async def score(self, *messages, rewards=()):
        return await self.send(HostOperation.SCORE, EpisodeSummary(messages, rewards, "stop"))

    async def close(self):
        return await self.send(HostOperation.CLOSE)

    async def wait_until_none_hangs(self):
        async with asyncio.timeout(30):
            while (await self.send(HostOperation.DESCRIBE)).num_hanging:
                await asyncio.sleep(0.001)
