"""How a step is worked off: which rounds, in which order, and after which the optimizer updates.

Pure: lengths in, turns out. With one update per step a round may be made as soon as it is full.
With several, groups are dealt to the updates once all are there, and by their uids alone: when a
group came has no say in which update it is part of.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamrl.buffer.assembly.packing import MicroBatch, Packer, Round


@dataclass(frozen=True)
class Pace:
    """How a trainer takes a step.

    whole_steps: nothing is trained before all groups of the step are there.
    epochs: how often each rollout is trained. mini_batches: updates per epoch.
    """

    whole_steps: bool = False
    epochs: int = 1
    mini_batches: int = 1

    def __post_init__(self) -> None:
        assert self.whole_steps or (self.epochs, self.mini_batches) == (1, 1)


@dataclass(frozen=True)
class Turn:
    """A round, and what follows it: nothing, an update, or the update that ends the step."""

    work: Round
    epoch: int = 0
    ends_update: bool = False
    ends_step: bool = False


@dataclass(frozen=True)
class Program:
    """All turns of a step, written short: the rounds of every update, gone through `epochs` times.

    A rollout stays with its rank through all epochs.
    """

    updates: tuple[tuple[Round, ...], ...]
    epochs: int = 1

    def turns(self) -> Iterator[Turn]:
        """One after the other."""
        last = (self.epochs - 1, len(self.updates) - 1)
        for epoch in range(self.epochs):
            for i, rounds in enumerate(self.updates):
                for j, work in enumerate(rounds):
                    ends = j == len(rounds) - 1
                    yield Turn(work, epoch, ends, ends and (epoch, i) == last)

    def dealt_to(self, num_shares: int) -> "Program":
        """The same micro-batches in the same order, dealt to another number of ranks.

        A sum over ranks and rounds, which an update divides once, stays what it was but for
        rounding.
        """
        return Program(tuple(_dealt(rounds, num_shares) for rounds in self.updates), self.epochs)


def _dealt(rounds: Sequence[Round], num_shares: int) -> tuple[Round, ...]:
    if all(len(work) == num_shares for work in rounds):
        return tuple(rounds)
    parts: list[MicroBatch] = [picks for work in rounds for picks in work if picks] or [()]
    parts += [()] * (-len(parts) % num_shares)
    starts = range(0, len(parts), num_shares)
    return tuple(tuple(parts[start : start + num_shares]) for start in starts)


class Schedule:
    """The turns of one step for one trainer, as its groups come."""

    def __init__(self, pace: Pace, *, world_size: int, micro_batch_tokens: int) -> None:
        self._pace = pace
        self._groups: dict[str, Sequence[int]] = {}
        self._packer = Packer(world_size=world_size, micro_batch_tokens=micro_batch_tokens)
        self._updates: list[tuple[Round, ...]] = [()]

    def add(self, uid: str, lengths: Sequence[int]) -> None:
        """A group is there; `lengths` are the tokens of its rollouts. Raises as `pack` does."""
        if self._pace.whole_steps:
            self._groups[uid] = lengths
        else:
            self._packer.add(uid, lengths)

    def turns(self, *, complete: bool) -> list[Turn]:
        """What may be trained now and was not handed out yet; `complete`: no group will follow."""
        if self._pace.whole_steps:
            if complete:
                self._updates = [self._pack(uids) for uids in self._dealt()]
            return list(self.program.turns()) if complete else []
        rounds = self._packer.rounds(final=complete)
        self._updates = [(*self._updates[0], *rounds)]
        last = len(rounds) - 1
        ends = [complete and i == last for i in range(len(rounds))]
        return [Turn(work, 0, end, end) for work, end in zip(rounds, ends, strict=True)]

    @property
    def program(self) -> Program:
        """All that was handed out, to be made again."""
        return Program(tuple(self._updates), self._pace.epochs)

    def _dealt(self) -> list[list[str]]:
        """The uids of each update, shuffled by a hash of theirs."""
        order = sorted(self._groups, key=lambda uid: hashlib.blake2b(uid.encode()).digest())
        return [order[i :: self._pace.mini_batches] for i in range(self._pace.mini_batches)]

    def _pack(self, uids: Sequence[str]) -> tuple[Round, ...]:
        for uid in uids:
            self._packer.add(uid, self._groups[uid])
        return tuple(self._packer.rounds(final=True))
