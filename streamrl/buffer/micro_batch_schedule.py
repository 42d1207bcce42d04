"""Micro-batches of a training step: rollouts to micro-batches, these to ranks and rounds in order.

Pure: lengths in, plans out. A micro-batch is padded to its longest rollout, so its cost is
rows * longest, and rollouts of similar length go together. All ranks take part in every round
because their collectives pair up; a rank without work gets an empty micro-batch. The samples of an
episode stay in one micro-batch, because a loss may compare all tokens of an episode.

Example: lengths 9, 8, 4, 4, 3 with micro_batch_tokens=12 and two ranks. Sorted and cut into
micro-batches, each padded to its first rollout: [9], [8], [4, 4, 3]. Three micro-batches do not
divide into two ranks, so the largest is halved: [4, 3] and [4]. Rounds: ([9], [8]), ([4], [4, 3]).

If a step has a single update, each round can be trained as soon as it is full. With several
updates, groups are assigned to updates once all groups are ready, by a hash of their uids: the
order of arrival does not decide which update trains a group.
"""

import bisect
import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

RolloutIndex = tuple[str, int]
"""(uid of the group, index of the rollout in the group)."""
MicroBatch = tuple[RolloutIndex, ...]
Round = tuple[MicroBatch, ...]
"""One micro-batch per rank, trained at the same time."""


INSERT_SHARE = 16
"""New episodes are inserted one by one if they are fewer than 1 / INSERT_SHARE of those pending."""

_SizedEpisode = tuple[int, str, int, int]
"""(-tokens of the longest sample with prompt, uid, index of the first sample, number of samples):
sorts longest first. A plain tuple, because thousands are sorted.
"""


def pack_rollouts(
    rollouts: Sequence[tuple[str, int, int]], *, dp_size: int, micro_batch_tokens: int
) -> list[Round]:
    """Pack rollouts (uid, index in the group, tokens) into rounds for `dp_size` ranks.

    Every rollout appears exactly once and is an episode of its own. Every micro-batch has at most
    `micro_batch_tokens` with padding. The padded tokens of two ranks, over all rounds, differ by at
    most `micro_batch_tokens`. No rank is idle in a round while a different rank has two episodes.
    Raises ValueError if a single rollout is longer than `micro_batch_tokens`.
    """
    packer = MicroBatchPacker(dp_size=dp_size, micro_batch_tokens=micro_batch_tokens)
    for uid, index, length in rollouts:
        packer.add_rollout(uid, index, length)
    return packer.take_rounds(final=True)


class MicroBatchPacker:
    """Packs the rollouts of a training step into rounds while its groups arrive.

    Full rounds can be taken early, the remaining rounds once the step is complete.
    """

    def __init__(self, *, dp_size: int, micro_batch_tokens: int) -> None:
        self._dp_size = dp_size
        self._max_tokens = micro_batch_tokens
        self._pending_episodes: list[_SizedEpisode] = []
        """Episodes that no round has yet, longest first."""
        self._new_episodes: list[_SizedEpisode] = []
        """Episodes added since the last `take_rounds`, unsorted."""
        self._has_joined_samples = False
        self._rank_loads = [0] * dp_size

    def add_group(self, uid: str, lengths: Sequence[int], samples: Sequence[int] = ()) -> None:
        """Add a group; `lengths` are the tokens of its rollouts.

        `samples` counts the rollouts of each episode; () if each rollout is an episode. Raises
        ValueError for an episode with more tokens than a micro-batch may have.
        """
        if not samples:
            if max(lengths, default=0) > self._max_tokens:
                self._check_length(uid, *max(enumerate(lengths), key=itemgetter(1)))
            self._new_episodes += [(-n, uid, index, 1) for index, n in enumerate(lengths)]
            return
        first = 0
        for count in samples:
            self._add_episode(uid, first, lengths[first : first + count])
            first += count

    def _add_episode(self, uid: str, first: int, lengths: Sequence[int]) -> None:
        longest = max(lengths)
        if len(lengths) * longest > self._max_tokens:
            self._check_length(uid, first, longest)
            raise ValueError(
                f"rollouts {first} to {first + len(lengths) - 1} of {uid} are samples of an"
                f" episode and have up to {longest} tokens each; a micro-batch, which must hold"
                f" them together, holds {self._max_tokens}"
            )
        self._has_joined_samples |= len(lengths) > 1
        self._new_episodes.append((-longest, uid, first, len(lengths)))

    def add_rollout(self, uid: str, index: int, length: int) -> None:
        self._check_length(uid, index, length)
        self._new_episodes.append((-length, uid, index, 1))

    def _check_length(self, uid: str, index: int, length: int) -> None:
        if length > self._max_tokens:
            raise ValueError(
                f"rollout {index} of {uid} has {length} tokens; a micro-batch holds"
                f" {self._max_tokens}"
            )

    def take_rounds(self, *, final: bool) -> list[Round]:
        """Remove and return the rounds that can be trained now.

        final: all groups of the step were added; return all remaining rollouts. Otherwise only
        rounds of full micro-batches are returned. A micro-batch is full if the next episode, or a
        further rollout as long as its longest, would exceed the token budget, so full micro-batches
        of episodes of one sample are more than half full.
        """
        self._sort_new_episodes()
        find_cuts = _find_sample_cuts if self._has_joined_samples else _find_cuts
        cuts = find_cuts(self._pending_episodes, self._max_tokens)
        if not final:
            last = self._pending_episodes[cuts[-2] : cuts[-1]] if len(cuts) > 1 else []
            num_full = len(cuts) - 1 - bool(last and not self._is_full(last))
            cuts = cuts[: num_full // self._dp_size * self._dp_size + 1]
        bins = [self._pending_episodes[start:end] for start, end in pairwise(cuts)]
        del self._pending_episodes[: cuts[-1]]
        rounds = _assign_ranks(
            _split_largest(bins, self._dp_size) if final else bins, self._rank_loads
        )
        if final:
            self._rank_loads = [0] * self._dp_size
        return rounds

    def _is_full(self, episodes: Sequence[_SizedEpisode]) -> bool:
        """Return True if a further rollout as long as the first would exceed the token budget."""
        rows = sum(e[3] for e in episodes) if self._has_joined_samples else len(episodes)
        return -episodes[0][0] * (rows + 1) > self._max_tokens

    def _sort_new_episodes(self) -> None:
        """Move the new episodes to their places among the pending ones."""
        if len(self._new_episodes) * INSERT_SHARE > len(self._pending_episodes):
            self._pending_episodes += self._new_episodes
            self._pending_episodes.sort()
        else:  # a few arrive while many wait: do not compare all of them again
            for episode in self._new_episodes:
                bisect.insort(self._pending_episodes, episode)
        self._new_episodes = []


def _find_cuts(episodes: Sequence[_SizedEpisode], budget: int) -> list[int]:
    """Return the indices at which sorted episodes are cut into micro-batches of `budget` tokens.

    episodes: of one sample each, longest first: the first of a micro-batch says how many fit.
    """
    cuts = [0]
    while cuts[-1] < len(episodes):
        longest = -episodes[cuts[-1]][0]
        cuts.append(min(cuts[-1] + budget // longest, len(episodes)) if longest else len(episodes))
    return cuts


def _find_sample_cuts(episodes: Sequence[_SizedEpisode], budget: int) -> list[int]:
    """Return the cuts of `_find_cuts` for episodes of any number of samples, by a look at each.

    episodes: longest first, so that a micro-batch is padded to its first episode's longest sample.
    """
    cuts, rows, most = [0], 0, 0.0
    for i, (negative_length, _, _, samples) in enumerate(episodes):
        rows += samples
        if rows > most:
            if i:
                cuts.append(i)
            rows, most = samples, budget // -negative_length if negative_length else math.inf
    return [*cuts, len(episodes)] if episodes else cuts


def _split_largest(bins: list[list[_SizedEpisode]], dp_size: int) -> list[list[_SizedEpisode]]:
    """Halve the largest micro-batches until their number is a multiple of `dp_size`.

    Stops early if only micro-batches of a single episode are left.
    """
    heap = [(-_count_padded_tokens(rows), i, rows) for i, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    halved: set[int] = set()
    split = list(bins)
    while heap and (len(split) - len(halved)) % dp_size:
        _, i, rows = heapq.heappop(heap)
        halved.add(i)
        for half in (rows[::2], rows[1::2]):
            if len(half) > 1:
                heapq.heappush(heap, (-_count_padded_tokens(half), len(split), half))
            split.append(half)
    return [rows for i, rows in enumerate(split) if i not in halved]


def _assign_ranks(bins: list[list[_SizedEpisode]], loads: list[int]) -> list[Round]:
    """Form rounds of one micro-batch per rank; the largest goes to the least loaded rank.

    loads: padded tokens of each rank so far; updated in place.
    """
    bins = sorted(bins, key=_count_padded_tokens, reverse=True)
    rounds: list[Round] = []
    for start in range(0, len(bins), len(loads)):
        micro_batches: list[MicroBatch] = [()] * len(loads)
        ranks = sorted(range(len(loads)), key=loads.__getitem__)
        for rank, rows in zip(ranks, bins[start : start + len(loads)], strict=False):
            micro_batches[rank] = tuple(
                [(uid, first + i) for _, uid, first, samples in rows for i in range(samples)]
            )
            loads[rank] += _count_padded_tokens(rows)
        rounds.append(tuple(micro_batches))
    return rounds


def _count_padded_tokens(episodes: Sequence[_SizedEpisode]) -> int:
    return -episodes[0][0] * sum(samples for *_, samples in episodes)


@dataclass(frozen=True)
class UpdatePlan:
    """Division of a training step into optimizer updates.

    requires_full_step: training starts only when all groups of the step are ready.
    num_epochs: passes over the rollouts of a step.
    num_mini_batches: updates per epoch.
    """

    requires_full_step: bool = False
    num_epochs: int = 1
    num_mini_batches: int = 1

    def __post_init__(self) -> None:
        assert self.requires_full_step or (self.num_epochs, self.num_mini_batches) == (1, 1)


@dataclass(frozen=True)
class ScheduledRound:
    """A round (one micro-batch per data-parallel rank) and its place in the training step."""

    micro_batches: Round
    epoch: int = 0
    is_last_of_update: bool = False
    is_last_of_step: bool = False


@dataclass(frozen=True)
class StepSchedule:
    """All rounds of a training step: the rounds of each update, repeated for `num_epochs`.

    A rollout is trained by the same data-parallel rank in all epochs.
    """

    update_rounds: tuple[tuple[Round, ...], ...]
    num_epochs: int = 1

    def iter_rounds(self) -> Iterator[ScheduledRound]:
        """Yield all rounds of the training step in order, all epochs included."""
        last = (self.num_epochs - 1, len(self.update_rounds) - 1)
        for epoch in range(self.num_epochs):
            for i, rounds in enumerate(self.update_rounds):
                for j, micro_batches in enumerate(rounds):
                    ends = j == len(rounds) - 1
                    yield ScheduledRound(micro_batches, epoch, ends, ends and (epoch, i) == last)

    def redistribute_rounds(self, dp_size: int) -> "StepSchedule":
        """Return this schedule for a different number of data-parallel ranks, `dp_size`.

        Micro-batches and their order stay the same. An update sums gradients over ranks and rounds
        and divides once, so that results change by rounding only.
        """
        return StepSchedule(
            tuple(_redistribute_rounds(rounds, dp_size) for rounds in self.update_rounds),
            self.num_epochs,
        )


def _redistribute_rounds(rounds: Sequence[Round], dp_size: int) -> tuple[Round, ...]:
    """Divide the micro-batches of an update into rounds of `dp_size`, filled up with empty ones."""
    if all(len(micro_batches) == dp_size for micro_batches in rounds):
        return tuple(rounds)
    work: list[MicroBatch] = [
        picks for micro_batches in rounds for picks in micro_batches if picks
    ] or [()]
    work += [()] * (-len(work) % dp_size)
    starts = range(0, len(work), dp_size)
    return tuple(tuple(work[start : start + dp_size]) for start in starts)


class StepScheduler:
    """Builds the schedule of a training step for one trained model while the groups arrive."""

    def __init__(self, update_plan: UpdatePlan, *, dp_size: int, micro_batch_tokens: int) -> None:
        self._update_plan = update_plan
        self._groups: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        """Lengths of the rollouts, and number of samples of each episode, by uid."""
        self._packer = MicroBatchPacker(dp_size=dp_size, micro_batch_tokens=micro_batch_tokens)
        self._update_rounds: list[list[Round]] = [[]]

    def add_group(self, uid: str, lengths: Sequence[int], samples: Sequence[int] = ()) -> None:
        """Add a group as `MicroBatchPacker.add_group` does."""
        if self._update_plan.requires_full_step:
            self._groups[uid] = lengths, samples
        else:
            self._packer.add_group(uid, lengths, samples)

    def take_rounds(self, *, complete: bool) -> list[ScheduledRound]:
        """Return the rounds that can be trained now and were not returned before.

        complete: all groups of the training step were added, so that all remaining rounds are
        returned. With `requires_full_step`, earlier calls return [].
        """
        if self._update_plan.requires_full_step:
            if complete:
                self._update_rounds = [
                    self._pack_groups(uids) for uids in self._split_mini_batches()
                ]
            return list(self.step_schedule.iter_rounds()) if complete else []
        rounds = self._packer.take_rounds(final=complete)
        self._update_rounds[0] += rounds
        last = len(rounds) - 1
        ends = [complete and i == last for i in range(len(rounds))]
        return [ScheduledRound(r, 0, end, end) for r, end in zip(rounds, ends, strict=True)]

    @property
    def step_schedule(self) -> StepSchedule:
        """Schedule of all rounds that `take_rounds` has returned, for a replay of the step."""
        return StepSchedule(tuple(map(tuple, self._update_rounds)), self._update_plan.num_epochs)

    def _split_mini_batches(self) -> list[list[str]]:
        """Divide the uids of all groups into mini-batches, in the order of a hash of the uid."""
        order = sorted(self._groups, key=lambda uid: hashlib.blake2b(uid.encode()).digest())
        return [
            order[i :: self._update_plan.num_mini_batches]
            for i in range(self._update_plan.num_mini_batches)
        ]

    def _pack_groups(self, uids: Sequence[str]) -> list[Round]:
        for uid in uids:
            self._packer.add_group(uid, *self._groups[uid])
        return self._packer.take_rounds(final=True)
