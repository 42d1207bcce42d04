"""Run log of a simulated run, in memory only."""

import asyncio

from streamrl.buffer import Ledger, RunLog
from streamrl.buffer.books.run_log import TrainedStep
from streamrl.buffer.log.journal import NullRecordLog


class SimulatedRunLog(RunLog):
    """Run log with a real ledger and no journal; recording a step takes `step_s` virtual seconds.

    keeps: whether to collect `steps_since_checkpoint`, the steps that a restart replays.
    """

    def __init__(self, ledger: Ledger, *, step_s: float, keeps: bool) -> None:
        super().__init__(ledger, NullRecordLog())
        self._step_s = step_s
        self._keeps_steps = keeps
        self.steps_since_checkpoint: dict[int, TrainedStep] = {}

    async def record_step(self, step: TrainedStep) -> None:
        """Count a trained step in the ledger, after `step_s`."""
        await asyncio.sleep(self._step_s)
        if self.steps_to_replay.pop(step.version, None) is None:
            for group in step.groups:
                self.ledger.mark_trained(group.uid)
        if self._keeps_steps:
            self.steps_since_checkpoint[step.version] = step
