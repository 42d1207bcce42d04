"""How a step is worked off: which rounds, in which order, and after which the optimizer updates.

Pure: lengths in, turns out. With one update per step a round may be made as soon as it is full.
With several, groups are dealt to the updates once all are there, and by their uids alone: when a
group came has no say in which update it is part of.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamrl.buffer.assembly.packing import MicroBatch, MicroBatchPacker, Round


@dataclass(frozen=True)
class UpdatePlan:
    """How a trainer takes a step.

    whole_steps: nothing is trained before all groups of the step are there.
    epochs: how often each rollout is trained. mini_batches: updates per epoch.
    """

    requires_full_step: bool = False
    num_epochs: int = 1
    num_mini_batches: int = 1

    def __post_init__(self) -> None:
        assert self.requires_full_step or (self.num_epochs, self.num_mini_batches) == (1, 1)


@dataclass(frozen=True)
class ScheduledRound:
    """A round, and what follows it: nothing, an update, or the update that ends the step."""

    micro_batches: Round
    epoch: int = 0
    is_last_of_update: bool = False
    is_last_of_step: bool = False


@dataclass(frozen=True)
class StepSchedule:
    """All turns of a step, written short: the rounds of every update, gone through `epochs` times.

    A rollout stays with its rank through all epochs.
    """

    update_rounds: tuple[tuple[Round, ...], ...]
    num_epochs: int = 1

    def iter_rounds(self) -> Iterator[ScheduledRound]:
        """One after the other."""
        last = (self.num_epochs - 1, len(self.update_rounds) - 1)
        for epoch in range(self.num_epochs):
            for i, rounds in enumerate(self.update_rounds):
                for j, work in enumerate(rounds):
                    ends = j == len(rounds) - 1
                    yield ScheduledRound(work, epoch, ends, ends and (epoch, i) == last)

    def redistribute_rounds(self, num_shares: int) -> "StepSchedule":
        """The same micro-batches in the same order, dealt to another number of ranks.

        A sum over ranks and rounds, which an update divides once, stays what it was but for
        rounding.
        """
        return StepSchedule(
            tuple(_redistribute_rounds(rounds, num_shares) for rounds in self.update_rounds),
            self.num_epochs,
        )


def _redistribute_rounds(rounds: Sequence[Round], num_shares: int) -> tuple[Round, ...]:
    if all(len(work) == num_shares for work in rounds):
        return tuple(rounds)
    parts: list[MicroBatch] = [picks for work in rounds for picks in work if picks] or [()]
    parts += [()] * (-len(parts) % num_shares)
    starts = range(0, len(parts), num_shares)
    return tuple(tuple(parts[start : start + num_shares]) for start in starts)


class StepScheduler:
    """The turns of one step for one trainer, as its groups come."""

    def __init__(self, pace: UpdatePlan, *, world_size: int, micro_batch_tokens: int) -> None:
        self._update_plan = pace
        self._group_lengths: dict[str, Sequence[int]] = {}
        self._packer = MicroBatchPacker(
            world_size=world_size, micro_batch_tokens=micro_batch_tokens
        )
        self._update_rounds: list[tuple[Round, ...]] = [()]

    def add_group(self, uid: str, lengths: Sequence[int]) -> None:
        """A group is there; `lengths` are the tokens of its rollouts. Raises as `pack` does."""
        if self._update_plan.requires_full_step:
            self._group_lengths[uid] = lengths
        else:
            self._packer.add_group(uid, lengths)

    def take_rounds(self, *, complete: bool) -> list[ScheduledRound]:
        """What may be trained now and was not handed out yet; `complete`: no group will follow."""
        if self._update_plan.requires_full_step:
            if complete:
                self._update_rounds = [
                    self._pack_groups(uids) for uids in self._split_mini_batches()
                ]
            return list(self.step_schedule.iter_rounds()) if complete else []
        rounds = self._packer.take_rounds(final=complete)
        self._update_rounds = [(*self._update_rounds[0], *rounds)]
        last = len(rounds) - 1
        ends = [complete and i == last for i in range(len(rounds))]
        return [ScheduledRound(work, 0, end, end) for work, end in zip(rounds, ends, strict=True)]

    @property
    def step_schedule(self) -> StepSchedule:
        """All that was handed out, to be made again."""
        return StepSchedule(tuple(self._update_rounds), self._update_plan.num_epochs)

    def _split_mini_batches(self) -> list[list[str]]:
        """The uids of each update, shuffled by a hash of theirs."""
        order = sorted(self._group_lengths, key=lambda uid: hashlib.blake2b(uid.encode()).digest())
        return [
            order[i :: self._update_plan.num_mini_batches]
            for i in range(self._update_plan.num_mini_batches)
        ]

    def _pack_groups(self, uids: Sequence[str]) -> tuple[Round, ...]:
        for uid in uids:
            self._packer.add_group(uid, self._group_lengths[uid])
        return tuple(self._packer.take_rounds(final=True))
