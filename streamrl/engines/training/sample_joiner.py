"""Rows of a micro-batch joined to episodes, for losses that compare all tokens of an episode."""

import torch
from torch import Tensor


class SampleJoiner:
    """Joins the samples of an episode, rows that follow each other, to one row.

    episode: int64 [B], the number of each row's episode, ascending from 0; None if each row is one.
    """

    def __init__(self, episode: Tensor | None) -> None:
        self._slots: Tensor | None = None
        if episode is None:
            return
        samples = torch.bincount(episode)
        self._firsts = samples.cumsum(0) - samples
        self._most_samples = int(samples.max())
        if self._most_samples > 1:
            position = torch.arange(len(episode), device=episode.device) - self._firsts[episode]
            self._slots = episode * self._most_samples + position

    def __call__(self, column: Tensor) -> Tensor:
        """Return [E] for [B], and [E, K T] for [B, T], where K is the largest number of samples.

        Rows of an episode must have equal entries in [B]. Episodes of fewer samples are padded with
        zeros. Gradients flow through [B, T].
        """
        if self._slots is None:
            return column
        if column.ndim == 1:
            return column[self._firsts]
        num_episodes, width = len(self._firsts), column.shape[1]
        joined = column.new_zeros(num_episodes * self._most_samples, width)
        joined[self._slots] = column
        return joined.reshape(num_episodes, -1)

    def split(self, column: Tensor) -> Tensor:
        """Return [B, T] for the column [E, K T] of joined rows."""
        if self._slots is None:
            return column
        return column.reshape(len(self._firsts) * self._most_samples, -1)[self._slots]
