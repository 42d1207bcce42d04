"""Which rollouts share a micro-batch, and which rank gets it.

Pure: lengths in, plans out. A micro-batch is padded to its longest rollout, so what is bounded is
rows times the longest, and rollouts of like length go together. All ranks take part in every round,
because their collectives pair up; one for which nothing is left gets an empty micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Pick = tuple[str, int]
"""A rollout: the uid of its group and its index in it."""
MicroBatch = tuple[Pick, ...]
Round = tuple[MicroBatch, ...]
"""One micro-batch per rank."""


@dataclass(frozen=True)
class Sized:
    """A rollout and its tokens, prompt included."""

    uid: str
    index: int
    length: int


def pack(
    rollouts: Sequence[tuple[str, int, int]], *, world_size: int, micro_batch_tokens: int
) -> list[Round]:
    """Rounds that hold every rollout (uid, index, length) exactly once.

    Every micro-batch is at most `micro_batch_tokens` with its padding, ranks differ by no more than
    that in what they get, and none is idle in a round while another has rows to give away. Raises
    ValueError if a single rollout is longer than that.
    """
    packer = Packer(world_size=world_size, micro_batch_tokens=micro_batch_tokens)
    for uid, index, length in rollouts:
        packer.add_rollout(Sized(uid, index, length))
    return packer.rounds(final=True)


class Packer:
    """Packs groups as they become ready: full rounds early, the rest when the step is complete."""

    def __init__(self, *, world_size: int, micro_batch_tokens: int) -> None:
        self._world_size = world_size
        self._budget = micro_batch_tokens
        self._waiting: list[Sized] = []
        self._loads = [0] * world_size

    def add(self, uid: str, lengths: Sequence[int]) -> None:
        """A group is ready; `lengths` are the tokens of its rollouts. Raises as `pack` does."""
        for index, length in enumerate(lengths):
            self.add_rollout(Sized(uid, index, length))

    def add_rollout(self, rollout: Sized) -> None:
        """One rollout is ready."""
        if rollout.length > self._budget:
            raise ValueError(
                f"rollout {rollout.index} of {rollout.uid} has {rollout.length} tokens; a"
                f" micro-batch holds {self._budget}"
            )
        self._waiting.append(rollout)

    def rounds(self, *, final: bool) -> list[Round]:
        """Rounds to run now, which are then out of the packer.

        Before the end of a step only rounds in which no micro-batch could take another rollout of
        its longest one's length, which leaves each more than half full. With `final` all that is
        left.
        """
        bins = _fill(sorted(self._waiting, key=_longest_first), self._budget)
        if final:
            bins = _spread(bins, self._world_size)
        else:
            full = [rows for rows in bins if (len(rows) + 1) * rows[0].length > self._budget]
            bins = full[: len(full) // self._world_size * self._world_size]
        taken = {rollout for rows in bins for rollout in rows}
        self._waiting = [rollout for rollout in self._waiting if rollout not in taken]
        rounds = _deal(bins, self._loads)
        if final:
            self._loads = [0] * self._world_size
        return rounds


def _longest_first(rollout: Sized) -> tuple[int, str, int]:
    return -rollout.length, rollout.uid, rollout.index


def _fill(rollouts: Sequence[Sized], budget: int) -> list[list[Sized]]:
    """Rollouts, longest first, cut into runs that fit when padded to their first."""
    bins: list[list[Sized]] = []
    for rollout in rollouts:
        if not bins or (len(bins[-1]) + 1) * bins[-1][0].length > budget:
            bins.append([])
        bins[-1].append(rollout)
    return bins


def _spread(bins: list[list[Sized]], world_size: int) -> list[list[Sized]]:
    """Halve the largest micro-batches until every rank has one in every round, or none is left."""
    bins = list(bins)
    while len(bins) % world_size:
        largest = max(bins, key=lambda rows: (len(rows) > 1, _padded(rows)))
        if len(largest) == 1:
            break
        bins.remove(largest)
        bins += [largest[::2], largest[1::2]]
    return bins


def _deal(bins: list[list[Sized]], loads: list[int]) -> list[Round]:
    """One micro-batch to each rank in turn, the largest to the rank that has had least.

    `loads` are the padded tokens of the ranks so far; they are brought up to date.
    """
    bins = sorted(bins, key=_padded, reverse=True)
    rounds: list[Round] = []
    for start in range(0, len(bins), len(loads)):
        dealt: list[MicroBatch] = [()] * len(loads)
        ranks = sorted(range(len(loads)), key=loads.__getitem__)
        for rank, rows in zip(ranks, bins[start : start + len(loads)], strict=False):
            dealt[rank] = tuple((rollout.uid, rollout.index) for rollout in rows)
            loads[rank] += _padded(rows)
        rounds.append(tuple(dealt))
    return rounds


def _padded(rows: Sequence[Sized]) -> int:
    return len(rows) * max(rollout.length for rollout in rows)
