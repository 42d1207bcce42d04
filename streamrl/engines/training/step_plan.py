"""What a rank knows of the groups of a step before it trains on them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from streamrl.algorithms import AlgorithmSettings
from streamrl.algorithms.math.correction import second_moment_limit
from streamrl.buffer.assembly.packing import RolloutIndex
from streamrl.engines.training.collate import find_token_slice
from streamrl.messages import Array, Columns


class StepPlan:
    """Columns derived from all groups of the step, and what the policy said of them at its start.

    The latter only of the rollouts of this rank, which keeps them through all epochs.
    """

    def __init__(self, settings: AlgorithmSettings, derived: Mapping[str, Columns]) -> None:
        """`derived` is what `derive_columns` made of all groups."""
        self._derived = {uid: dict(columns) for uid, columns in derived.items()}
        self._second_moment_threshold = settings.correction.second_moment_threshold
        self._squared_log_ratios: list[tuple[str, slice, Array]] = []

    def get_derived(self, uids: Iterable[str]) -> dict[str, Columns]:
        """The columns of these groups, by uid."""
        return {uid: self._derived[uid] for uid in uids}

    def add_proximal_logprobs(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], logprobs: Array
    ) -> None:
        """The policy at the start of the step gives these logprobs, [B, T], to the picks."""
        for (uid, index), row in zip(picks, logprobs[: len(picks)], strict=True):
            tokens = find_token_slice(groups[uid]["lengths"], index)
            own = row[: tokens.stop - tokens.start]
            self._fill_column(uid, "proximal_logprobs", tokens, own)
            if self._second_moment_threshold is not None:
                behind = own - groups[uid]["generator_logprobs"][tokens]
                self._squared_log_ratios.append((uid, tokens, np.square(behind, dtype=np.float64)))
                self._fill_column(uid, "near", tokens, self._derived[uid]["loss_mask"][tokens])

    def sync_near_mask(self, *, tensor_parallel: int) -> None:
        """Agree with the other ranks which tokens are near enough. Collective; after `note`.

        So many neighbours have noted the same, which counts once.
        """
        if self._second_moment_threshold is None:
            return
        counted = [
            squares[self._derived[uid]["near"][tokens]]
            for uid, tokens, squares in self._squared_log_ratios
        ]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, np.concatenate([np.zeros(0), *counted]))
        everyone = torch.from_numpy(np.concatenate(parts[::tensor_parallel]))
        limit = second_moment_limit(everyone, threshold=self._second_moment_threshold)
        for uid, tokens, squares in self._squared_log_ratios:
            self._derived[uid]["near"][tokens] &= squares <= limit

    def _fill_column(self, uid: str, name: str, tokens: slice, values: Array) -> None:
        blank = np.zeros(len(self._derived[uid]["loss_mask"]), values.dtype)
        self._derived[uid].setdefault(name, blank)[tokens] = values
