"""Environment of `benchmarks.episodes`: asks for sums, and sleeps where the row says so."""

import asyncio
import random

from streamrl.environments import Turn
from streamrl.environments.interface import Reply
from streamrl.messages import Prompt


class SumQuestions:
    """Asks for the sum of two numbers in every turn, whatever the policy answers.

    A row with `extra_info.nap_s` sleeps from its first answer on, in naps of this many seconds.
    """

    async def reset(self, row: Prompt, seed: int) -> str:
        self.random = random.Random(seed)
        self.nap_s = float(row.extra_info.get("nap_s", 0))
        return self._ask()

    async def step(self, reply: Reply) -> Turn:
        while self.nap_s:
            await asyncio.sleep(self.nap_s)
        return Turn(self._ask())

    def _ask(self) -> str:
        return f"{self.random.randrange(10, 100)}+{self.random.randrange(10, 100)}"
