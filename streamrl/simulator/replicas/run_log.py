"""Books that are kept in memory alone."""

import asyncio
from collections.abc import Sequence

from streamrl.buffer import Books, Ledger
from streamrl.buffer.books.run_log import TrainedStep
from streamrl.buffer.log.segment_file import Record


class _NoLog:
    """A log that keeps nothing: what a simulation crashes of is not its own."""

    num_bytes = 0

    def drain_fsync_s(self) -> float:
        return 0.0

    async def append(self, records: Sequence[Record], *, sync: bool = True) -> None:
        pass

    def post(self, records: Sequence[Record]) -> None:
        pass


class TimedBooks(Books):
    """A real ledger without a log; a step takes step_s to be booked.

    `made` are the steps since the last checkpoint, if somebody `keeps` them.
    """

    def __init__(self, ledger: Ledger, *, step_s: float, keeps: bool) -> None:
        super().__init__(ledger, _NoLog())
        self._step_s = step_s
        self._keeps = keeps
        self.made: dict[int, TrainedStep] = {}

    async def train(self, step: TrainedStep) -> None:
        """As any books, but for the record."""
        await asyncio.sleep(self._step_s)
        if self.steps.pop(step.version, None) is None:
            for group in step.groups:
                self.ledger.train(group.uid)
        if self._keeps:
            self.made[step.version] = step
