"""Completion lengths of a run, resampled by group: lengths within a group are similar."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from streamrl.dataflow import GENERATE_CALL, GREEDY_CALL
from streamrl.messages import Array
from streamrl.placement.workload import EmpiricalLengths


@dataclass(frozen=True)
class GroupedLengths(EmpiricalLengths):
    """Length distribution that draws whole groups of a run, with replacement.

    samples: sampled completions of all groups; quantiles and the expected longest are those of
    independent completions, which makes the longest slightly too long.
    rows: int64 [groups, group_size + 1], in tokens; the last column is the greedy completion.
    """

    rows: Array = field(compare=False)

    @classmethod
    def from_groups(cls, sampled: "Iterable[tuple[str, str, tuple[int, ...]]]") -> "GroupedLengths":
        """Build the distribution from (uid, stage, completion lengths) of each sampling.

        For a group without a greedy completion, the first sampled completion replaces it.
        """
        groups: dict[str, tuple[int, ...]] = {}
        greedy: dict[str, int] = {}
        for uid, stage, lengths in sampled:
            if stage == GENERATE_CALL.stage:
                groups[uid] = lengths
            elif stage == GREEDY_CALL.stage:
                greedy[uid] = lengths[0]
        rows = [(*lengths, greedy.get(uid, lengths[0])) for uid, lengths in groups.items()]
        positive = np.maximum(np.array(rows, np.int64), 1)
        return cls(tuple(sorted(positive[:, :-1].ravel().tolist())), positive)

    @property
    def max_tokens(self) -> int:
        return int(self.rows.max())

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Return `count` random completion lengths; those of a group are adjacent."""
        size = self.rows.shape[1]
        drawn = rng.integers(0, len(self.rows), -(-count // size))
        lengths: Array = self.rows[drawn].ravel()[:count]
        return lengths
