"""Columns that a rank computes for all groups of a training step before training on any of them."""

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
    """Columns computed ahead for a training step: derived columns, proximal logprobs and a mask.

    Derived columns cover all groups of the step. Proximal logprobs, those of the policy at the
    start of the step, cover only this rank's rollouts; a rank keeps its rollouts through all
    epochs.
    """

    def __init__(self, settings: AlgorithmSettings, derived: Mapping[str, Columns]) -> None:
        self._derived = {uid: dict(columns) for uid, columns in derived.items()}
        self._second_moment_threshold = settings.correction.second_moment_threshold
        self._squared_log_ratios: list[tuple[str, slice, Array]] = []

    def get_derived(self, uids: Iterable[str]) -> dict[str, Columns]:
        """Return the columns computed so far for these groups, by uid."""
        return {uid: self._derived[uid] for uid in uids}

    def add_proximal_logprobs(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], logprobs: Array
    ) -> None:
        """Store logprobs [B, T] of picked rollouts under the policy at the start of the step.

        `picks` are (uid, index of the rollout in its group), in the order of the rows of
        `logprobs`.
        """
        for (uid, index), row in zip(picks, logprobs[: len(picks)], strict=True):
            tokens = find_token_slice(groups[uid]["lengths"], index)
            token_logprobs = row[: tokens.stop - tokens.start]
            self._fill_column(uid, "proximal_logprobs", tokens, token_logprobs)
            if self._second_moment_threshold is not None:
                log_ratio = token_logprobs - groups[uid]["generator_logprobs"][tokens]
                self._squared_log_ratios.append(
                    (uid, tokens, np.square(log_ratio, dtype=np.float64))
                )
                self._fill_column(uid, "near", tokens, self._derived[uid]["loss_mask"][tokens])

    def sync_near_mask(self, *, ranks_per_batch: int) -> None:
        """Exclude tokens from the mask `near` whose log ratio exceeds a limit common to all ranks.

        Collective; call it after the last `add_proximal_logprobs`. The log ratio of a token is its
        proximal minus its generator logprob. `second_moment_limit` computes the limit from the
        squares of all ranks. Those of `ranks_per_batch` consecutive ranks are equal and count once.
        """
        if self._second_moment_threshold is None:
            return
        unmasked = [
            squares[self._derived[uid]["near"][tokens]]
            for uid, tokens, squares in self._squared_log_ratios
        ]
        rank_squares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rank_squares, np.concatenate([np.zeros(0), *unmasked]))
        all_squares = torch.from_numpy(np.concatenate(rank_squares[::ranks_per_batch]))
        limit = second_moment_limit(all_squares, threshold=self._second_moment_threshold)
        for uid, tokens, squares in self._squared_log_ratios:
            self._derived[uid]["near"][tokens] &= squares <= limit

    def _fill_column(self, uid: str, name: str, tokens: slice, values: Array) -> None:
        """Write values for the tokens of a rollout into a column of its group."""
        zeros = np.zeros(len(self._derived[uid]["loss_mask"]), values.dtype)
        self._derived[uid].setdefault(name, zeros)[tokens] = values
