"""Prompts without tokens, and how long their completions are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.messages import Prompt, make_uid, parse_uid
from streamrl.placement.workload import Workload

_BLOCK = 256
"""Prompts of which is drawn at once what they come to."""


class Prompts:
    """Endless: a PromptSource."""

    def __init__(self) -> None:
        self._drawn = 0
        self._tokens = np.zeros(1, np.int32)

    async def ready(self, count: int) -> None:
        """They always are."""

    def draw(self, count: int) -> list[Prompt]:
        """The next ones."""
        first, self._drawn = self._drawn, self._drawn + count
        return [self.prompt(make_uid(0, index)) for index in range(first, self._drawn)]

    def prompt(self, uid: str) -> Prompt:
        """The one of a uid."""
        return Prompt(uid, self._tokens)

    def retry(self, uid: str) -> Prompt:
        """The same as its next attempt."""
        epoch, index, attempt = parse_uid(uid)
        return self.prompt(make_uid(epoch, index, attempt + 1))

    def state_dict(self) -> Mapping[str, Any]:
        """How many were drawn."""
        return {"drawn": self._drawn}


class Completions:
    """Lengths by prompt, drawn by number: the same whatever becomes of it, and when."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.prompt_tokens = workload.whole_prompt_tokens
        self.group_size = workload.group_size
        self._lengths = workload.lengths
        self._filtered = workload.filtered
        self._seed = seed
        self._blocks: dict[int, list[list[int]]] = {}
        self._fates: dict[int, list[bool]] = {}
        self._by_uid: dict[str, list[int]] = {}

    def of(self, uid: str) -> Sequence[int]:
        """Tokens of each completion of its group."""
        found = self._by_uid.get(uid)
        if found is None:
            found = self._by_uid[uid] = self._row(uid)[:-1]
        return found

    def is_filtered(self, uid: str) -> bool:
        """Whether its group is taken out once it is scored."""
        if not self._filtered:
            return False
        block, place = divmod(parse_uid(uid)[1], _BLOCK)
        if block not in self._fates:
            rng = np.random.default_rng((self._seed, block, 1))
            self._fates[block] = (rng.random(_BLOCK) < self._filtered).tolist()
        return self._fates[block][place]

    def greedy(self, uid: str) -> int:
        """Tokens of its greedy completion."""
        return self._row(uid)[-1]

    def _row(self, uid: str) -> list[int]:
        block, place = divmod(parse_uid(uid)[1], _BLOCK)
        if block not in self._blocks:
            rng = np.random.default_rng((self._seed, block))
            drawn = self._lengths.sample(_BLOCK * (self.group_size + 1), rng)
            self._blocks[block] = drawn.reshape(_BLOCK, -1).tolist()
        return self._blocks[block][place]
