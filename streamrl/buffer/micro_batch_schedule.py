"""Schedule of a training step: its rounds in order, and the updates between them.

Pure functions of the rollouts' lengths. If a step has a single update, each round can be trained as
soon as it is full. With several updates, groups are assigned to updates once all groups are ready,
by a hash of their uids: the order of arrival does not decide which update trains a group.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamrl.buffer.packing import MicroBatch, MicroBatchPacker, Round


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

    def __init__(
        self, update_plan: UpdatePlan, *, world_size: int, micro_batch_tokens: int
    ) -> None:
        self._update_plan = update_plan
        self._groups: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        """Lengths of the rollouts, and number of samples of each episode, by uid."""
        self._packer = MicroBatchPacker(
            world_size=world_size, micro_batch_tokens=micro_batch_tokens
        )
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
