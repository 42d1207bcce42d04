"""Lengths as a run had them: completions of one prompt are more alike than others."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from streamrl.dataflow import GENERATE_CALL, GREEDY_CALL
from streamrl.messages import Array
from streamrl.placement import EmpiricalLengths


@dataclass(frozen=True)
class GroupedLengths:
    """Drawn group by group, with repetition, from groups that were seen.

    rows: int64 [groups, group_size + 1]; the last of each is that of the greedy completion.
    """

    rows: Array = field(compare=False)

    @classmethod
    def from_groups(cls, sampled: "Iterable[tuple[str, str, tuple[int, ...]]]") -> "GroupedLengths":
        """Of (uid, stage, lengths); a group without a greedy completion has one of its own."""
        groups: dict[str, tuple[int, ...]] = {}
        greedy: dict[str, int] = {}
        for uid, stage, lengths in sampled:
            if stage == GENERATE_CALL.stage:
                groups[uid] = lengths
            elif stage == GREEDY_CALL.stage:
                greedy[uid] = lengths[0]
        rows = [(*own, greedy.get(uid, own[0])) for uid, own in groups.items()]
        return cls(np.maximum(np.array(rows, np.int64), 1))

    @cached_property
    def _sampled_lengths(self) -> EmpiricalLengths:
        return EmpiricalLengths.from_samples(self.rows[:, :-1].ravel().tolist())

    @property
    def mean(self) -> float:
        """The mean of those that are sampled."""
        return self._sampled_lengths.mean

    @property
    def max_tokens(self) -> int:
        """The most that one has."""
        return int(self.rows.max())

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """So many, in groups one behind the other."""
        size = self.rows.shape[1]
        drawn = rng.integers(0, len(self.rows), -(-count // size))
        found: Array = self.rows[drawn].ravel()[:count]
        return found

    def quantiles(self, parts: Array) -> Array:
        """Of those that are sampled, interpolated."""
        return self._sampled_lengths.quantiles(parts)

    def expected_longest(self, count: int) -> float:
        """As if none were more alike than others: a little too long."""
        return self._sampled_lengths.expected_longest(count)
