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
from streamrl.messages import EPISODE_COLUMN, Array, Columns


class StepPlan:
    """Columns computed ahead for a training step: derived columns, proximal logprobs and a mask.

    Derived columns cover all groups of the step. Proximal logprobs, those of the policy at the
    start of the step, and the mask `near` of the tokens that the correction keeps cover only this
    rank's rollouts; a rank keeps its rollouts through all epochs.
    """

    def __init__(self, settings: AlgorithmSettings, derived: Mapping[str, Columns]) -> None:
        self._derived = {uid: dict(columns) for uid, columns in derived.items()}
        self._correction = settings.correction
        self._squared_log_ratios: list[tuple[RolloutIndex, slice, Array]] = []

    def get_derived(self, uids: Iterable[str]) -> dict[str, Columns]:
        """Return the columns computed so far for these groups, by uid."""
        return {uid: self._derived[uid] for uid in uids}

    def add_proximal_logprobs(
        self,
        groups: Mapping[str, Columns],
        picks: Sequence[RolloutIndex],
        logprobs: Array,
        near: Array,
    ) -> None:
        """Store logprobs [B, T] of picked rollouts under the policy at the start of the step.

        `picks` are (uid, index of the rollout in its group), in the order of the rows of
        `logprobs` and of `near`, bool [B, T].
        """
        for (uid, index), row, near_row in zip(picks, logprobs, near, strict=False):
            columns = groups[uid]
            tokens = find_token_slice(columns["lengths"], index)
            token_logprobs = row[: tokens.stop - tokens.start]
            self._fill_column(uid, "proximal_logprobs", tokens, token_logprobs)
            if self._correction.masks_before_updates:
                log_ratio = token_logprobs - columns["generator_logprobs"][tokens]
                episode = (
                    int(columns[EPISODE_COLUMN][index]) if EPISODE_COLUMN in columns else index
                )
                self._squared_log_ratios.append(
                    ((uid, episode), tokens, np.square(log_ratio, dtype=np.float64))
                )
                self._fill_column(uid, "near", tokens, near_row[: len(token_logprobs)])

    def sync_near_mask(self, *, ranks_per_batch: int) -> set[RolloutIndex]:
        """Finish the mask `near`; return episodes of all ranks of which it keeps no token.

        Collective; call it after the last `add_proximal_logprobs`. With `second_moment_threshold`,
        the mask loses tokens whose log ratio, proximal minus generator logprob, exceeds a limit
        that `second_moment_limit` computes from the squares of all ranks. Those of
        `ranks_per_batch` consecutive ranks are equal and count once. Episodes are (uid, index).
        """
        if not self._correction.masks_before_updates:
            return set()
        if self._correction.second_moment_threshold is not None:
            unmasked = [
                squares[self._derived[uid]["loss_mask"][tokens]]
                for (uid, _), tokens, squares in self._squared_log_ratios
            ]
            rank_squares = _gather(np.concatenate([np.zeros(0), *unmasked]))[::ranks_per_batch]
            limit = second_moment_limit(
                torch.from_numpy(np.concatenate(rank_squares)),
                threshold=self._correction.second_moment_threshold,
            )
            for (uid, _), tokens, squares in self._squared_log_ratios:
                self._derived[uid]["near"][tokens] &= squares <= limit
        trained, kept = (
            {
                (uid, episode)
                for (uid, episode), tokens, _ in self._squared_log_ratios
                if self._derived[uid][name][tokens].any()
            }
            for name in ("loss_mask", "near")
        )
        rejected: list[set[RolloutIndex]] = _gather(trained - kept)
        return set[RolloutIndex]().union(*rejected)

    def replace_derived(self, derived: Mapping[str, Columns]) -> None:
        """Replace derived columns, by uid; keep the columns computed since."""
        for uid, columns in derived.items():
            self._derived[uid] |= columns

    def _fill_column(self, uid: str, name: str, tokens: slice, values: Array) -> None:
        """Write values for the tokens of a rollout into a column of its group."""
        zeros = np.zeros(len(self._derived[uid]["loss_mask"]), values.dtype)
        self._derived[uid].setdefault(name, zeros)[tokens] = values


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
