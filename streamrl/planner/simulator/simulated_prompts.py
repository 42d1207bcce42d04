"""Simulated prompts without tokens, and the lengths of their completions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.messages import Prompt, make_uid, parse_uid
from streamrl.planner.problem.workload import Workload

_BLOCK_SIZE = 256
"""Number of consecutive prompts for which completion lengths are drawn together."""


class SimulatedPrompts:
    """Endless source of prompts without tokens."""

    def __init__(self) -> None:
        self._num_drawn = 0
        self._tokens = np.zeros(1, np.int32)

    async def prefetch_prompts(self, count: int) -> None:
        """Return at once: simulated prompts are not read from anywhere."""

    def draw_prompts(self, count: int) -> list[Prompt]:
        first, self._num_drawn = self._num_drawn, self._num_drawn + count
        return [self.get_prompt(make_uid(0, index)) for index in range(first, self._num_drawn)]

    def get_prompt(self, uid: str) -> Prompt:
        return Prompt(uid, self._tokens)

    def state_dict(self) -> Mapping[str, Any]:
        return {"drawn": self._num_drawn}


class CompletionLengths:
    """Completion lengths of each prompt, in tokens.

    Simulations with the same seed draw the same lengths, whatever the order of requests.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self.prompt_tokens = workload.rounded_prompt_tokens
        self.group_size = workload.group_size
        self._lengths = workload.lengths
        self._filtered_fraction = workload.filtered_fraction
        self._seed = seed
        self._length_blocks: dict[int, list[list[int]]] = {}
        self._filtered_flags: dict[int, list[bool]] = {}
        self._lengths_by_uid: dict[str, list[int]] = {}
        self._rollout_tokens_by_uid: dict[str, list[int]] = {}

    def get_rollout_tokens(self, uid: str) -> Sequence[int]:
        """Return the tokens of each rollout of a prompt, the prompt's included."""
        tokens = self._rollout_tokens_by_uid.get(uid)
        if tokens is None:
            tokens = [self.prompt_tokens + length for length in self.get_lengths(uid)]
            self._rollout_tokens_by_uid[uid] = tokens
        return tokens

    def get_lengths(self, uid: str) -> Sequence[int]:
        """Return the sampled tokens of each rollout of a prompt."""
        lengths = self._lengths_by_uid.get(uid)
        if lengths is None:
            lengths = self._lengths_by_uid[uid] = self._draw_lengths(uid)[:-1]
        return lengths

    def is_filtered(self, uid: str) -> bool:
        """Return whether the group filter will reject a group after scoring."""
        if not self._filtered_fraction:
            return False
        block, offset = divmod(parse_uid(uid)[1], _BLOCK_SIZE)
        if block not in self._filtered_flags:
            rng = np.random.default_rng((self._seed, block, 1))
            self._filtered_flags[block] = (
                rng.random(_BLOCK_SIZE) < self._filtered_fraction
            ).tolist()
        return self._filtered_flags[block][offset]

    def get_greedy_length(self, uid: str) -> int:
        return self._draw_lengths(uid)[-1]

    def _draw_lengths(self, uid: str) -> list[int]:
        """Return the lengths of a prompt's completions, the greedy completion included."""
        block, offset = divmod(parse_uid(uid)[1], _BLOCK_SIZE)
        if block not in self._length_blocks:
            rng = np.random.default_rng((self._seed, block))
            drawn = self._lengths.sample(_BLOCK_SIZE * (self.group_size + 1), rng)
            self._length_blocks[block] = drawn.reshape(_BLOCK_SIZE, -1).tolist()
        return self._length_blocks[block][offset]
