"""Totals over evaluated episodes: turns, tool calls and ends at a limit."""

from dataclasses import astuple, dataclass
from typing import Self

import numpy as np

from streamrl.group_episodes import count_samples, find_first_samples
from streamrl.messages import TRUNCATIONS, Columns, FinishReason


@dataclass(frozen=True)
class EpisodeTotals:
    """Totals over episodes; `sum` of totals and `EpisodeTotals()` adds them up.

    truncated: episodes that ended at a limit of turns or tokens. timeouts: at the limit of time.
    """

    episodes: int = 0
    turns: int = 0
    calls: int = 0
    invalid_calls: int = 0
    truncated: int = 0
    timeouts: int = 0

    @classmethod
    def from_columns(cls, columns: Columns) -> Self:
        """Compute the totals of a prompt's rollouts; all are 0 for completions."""
        if "num_turns" not in columns:
            return cls()
        firsts = find_first_samples(count_samples(columns))
        reasons = columns["finish_reason"][firsts]
        return cls(
            episodes=len(reasons),
            turns=int(columns["num_turns"].sum()),
            calls=int(columns["num_calls"][firsts].sum()),
            invalid_calls=int(columns["num_invalid_calls"][firsts].sum()),
            truncated=int(np.isin(reasons, [reason.value for reason in TRUNCATIONS]).sum()),
            timeouts=int((reasons == FinishReason.TIMEOUT.value).sum()),
        )

    def __add__(self, other: "EpisodeTotals") -> "EpisodeTotals":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return EpisodeTotals(*(mine + others for mine, others in pairs))

    def compute_means(self) -> dict[str, float]:
        """Return the means by metric name, as in `eval/turns`; {} without episodes.

        Without a tool call there is no `malformed_frac`.
        """
        if not self.episodes:
            return {}
        means = {
            "turns": self.turns / self.episodes,
            "calls": self.calls / self.episodes,
            "truncated_frac": self.truncated / self.episodes,
            "timeout_frac": self.timeouts / self.episodes,
        }
        if self.calls:
            means["malformed_frac"] = self.invalid_calls / self.calls
        return means
