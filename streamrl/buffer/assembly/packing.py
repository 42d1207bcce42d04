"""Which rollouts share a micro-batch, and which rank gets it.

Pure: lengths in, plans out. A micro-batch is padded to its longest rollout, so what is bounded is
rows times the longest, and rollouts of like length go together. All ranks take part in every round,
because their collectives pair up; one for which nothing is left gets an empty micro-batch.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

RolloutIndex = tuple[str, int]
"""A rollout: the uid of its group and its index in it."""
MicroBatch = tuple[RolloutIndex, ...]
Round = tuple[MicroBatch, ...]
"""One micro-batch per rank."""


_SizedRollout = tuple[int, str, int]
"""A rollout by its tokens, prompt included, as a negative number, its group's uid and its index in
it: in order, the longest come first. A plain tuple, as they are sorted by the thousand.
"""


def pack_rollouts(
    rollouts: Sequence[tuple[str, int, int]], *, world_size: int, micro_batch_tokens: int
) -> list[Round]:
    """Rounds that hold every rollout (uid, index, length) exactly once.

    Every micro-batch is at most `micro_batch_tokens` with its padding, ranks differ by no more than
    that in what they get, and none is idle in a round while another has rows to give away. Raises
    ValueError if a single rollout is longer than that.
    """
    packer = MicroBatchPacker(world_size=world_size, micro_batch_tokens=micro_batch_tokens)
    for uid, index, length in rollouts:
        packer.add_rollout(uid, index, length)
    return packer.take_rounds(final=True)


class MicroBatchPacker:
    """Packs groups as they become ready: full rounds early, the rest when the step is complete."""

    def __init__(self, *, world_size: int, micro_batch_tokens: int) -> None:
        self._world_size = world_size
        self._max_tokens = micro_batch_tokens
        self._pending_rollouts: list[_SizedRollout] = []
        self._rank_loads = [0] * world_size

    def add_group(self, uid: str, lengths: Sequence[int]) -> None:
        """A group is ready; `lengths` are the tokens of its rollouts. Raises as `pack` does."""
        if max(lengths, default=0) > self._max_tokens:
            self._check_length(uid, *max(enumerate(lengths), key=itemgetter(1)))
        self._pending_rollouts += [(-length, uid, index) for index, length in enumerate(lengths)]

    def add_rollout(self, uid: str, index: int, length: int) -> None:
        """One rollout is ready."""
        self._check_length(uid, index, length)
        self._pending_rollouts.append((-length, uid, index))

    def _check_length(self, uid: str, index: int, length: int) -> None:
        if length > self._max_tokens:
            raise ValueError(
                f"rollout {index} of {uid} has {length} tokens; a micro-batch holds"
                f" {self._max_tokens}"
            )

    def take_rounds(self, *, final: bool) -> list[Round]:
        """Rounds to run now, which are then out of the packer.

        Before the end of a step only rounds in which no micro-batch could take another rollout of
        its longest one's length, which leaves each more than half full. With `final` all that is
        left.
        """
        # Most were in order before, which costs next to nothing.
        self._pending_rollouts.sort()
        cuts = _find_cuts(self._pending_rollouts, self._max_tokens)
        if not final:
            last = self._pending_rollouts[cuts[-2] : cuts[-1]] if len(cuts) > 1 else []
            num_full = len(cuts) - 1 - bool(last and not _is_full(last, self._max_tokens))
            cuts = cuts[: num_full // self._world_size * self._world_size + 1]
        bins = [self._pending_rollouts[start:end] for start, end in pairwise(cuts)]
        self._pending_rollouts = self._pending_rollouts[cuts[-1] :]
        rounds = _assign_ranks(
            _split_largest(bins, self._world_size) if final else bins, self._rank_loads
        )
        if final:
            self._rank_loads = [0] * self._world_size
        return rounds


def _find_cuts(rollouts: Sequence[_SizedRollout], budget: int) -> list[int]:
    """Where to cut rollouts, longest first, into runs that fit when padded to their first."""
    cuts = [0]
    while cuts[-1] < len(rollouts):
        length = -rollouts[cuts[-1]][0]
        rows = budget // length if length else len(rollouts)
        cuts.append(min(cuts[-1] + rows, len(rollouts)))
    return cuts


def _is_full(rows: Sequence[_SizedRollout], budget: int) -> bool:
    """Whether another one as long as the longest would be too much."""
    return (len(rows) + 1) * -rows[0][0] > budget


def _split_largest(bins: list[list[_SizedRollout]], world_size: int) -> list[list[_SizedRollout]]:
    """Halve the largest micro-batches until every rank has one in every round, or none is left."""
    heap = [(-_count_padded_tokens(rows), i, rows) for i, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    halved: set[int] = set()
    made = list(bins)
    while heap and (len(made) - len(halved)) % world_size:
        _, i, rows = heapq.heappop(heap)
        halved.add(i)
        for half in (rows[::2], rows[1::2]):
            if len(half) > 1:
                heapq.heappush(heap, (-_count_padded_tokens(half), len(made), half))
            made.append(half)
    return [rows for i, rows in enumerate(made) if i not in halved]


def _assign_ranks(bins: list[list[_SizedRollout]], loads: list[int]) -> list[Round]:
    """One micro-batch to each rank in turn, the largest to the rank that has had least.

    `loads` are the padded tokens of the ranks so far; they are brought up to date.
    """
    bins = sorted(bins, key=_count_padded_tokens, reverse=True)
    rounds: list[Round] = []
    for start in range(0, len(bins), len(loads)):
        dealt: list[MicroBatch] = [()] * len(loads)
        ranks = sorted(range(len(loads)), key=loads.__getitem__)
        for rank, rows in zip(ranks, bins[start : start + len(loads)], strict=False):
            dealt[rank] = tuple([(uid, index) for _, uid, index in rows])
            loads[rank] += _count_padded_tokens(rows)
        rounds.append(tuple(dealt))
    return rounds


def _count_padded_tokens(rows: Sequence[_SizedRollout]) -> int:
    return len(rows) * -rows[0][0]
