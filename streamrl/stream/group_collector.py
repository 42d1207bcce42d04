"""The groups of one step, taken from the queue as they come, also while others are trained."""

import asyncio
import math
import sys
from collections.abc import Mapping
from types import TracebackType

from streamrl.errors import DeadlineError
from streamrl.messages import Ended, GroupInfo
from streamrl.stream.protocols import Stage
from streamrl.stream.run_state import Control, PipelineConfig
from streamrl.stream.stage_worker import WAIT_S


class Gathering:
    """Offers the assembler what the queue has, until the step of the current version is whole.

    Whoever trains may be busy, or wait for its devices, for long: a group that is filtered
    meanwhile is booked at once, so that another one is sampled in its place, also for later steps
    once this one is whole. What is open when it is left stays in the queue, or with the assembler.
    """

    def __init__(self, stage: Stage, control: Control, config: PipelineConfig) -> None:
        self._stage, self._control, self._config = stage, control, config
        self._loop = asyncio.get_running_loop()
        self._has_come = False
        """Something has, since somebody last asked."""
        self._asked_at = math.inf
        """Since when somebody waits for groups."""
        self._news: asyncio.Future[None] | None = None
        self._is_taking = self._left = False

    async def __aenter__(self) -> "Gathering":
        await drop_late(self._stage, self._control)
        self._task = asyncio.create_task(self._gather())
        self._task.add_done_callback(lambda task: self._tell())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What is being booked is booked to its end, unless whoever trains is cancelled.
        self._left = True
        if self._is_taking or isinstance(error, asyncio.CancelledError):
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (wrong := self._task.exception()) and error is None:
            raise wrong

    async def some(self) -> bool:
        """Wait until something has come that may enter the step; False if the run is stopping.

        Raises DeadlineError naming the groups the step waits for, and where they are, once that
        takes longer than `on_stall` allows, and FilterError or DropError as `Control.end` does.
        """
        if not (self._has_come or self._task.done() or self._drawable):
            self._asked_at, self._news = self._loop.time(), self._loop.create_future()
            await self._news
            self._asked_at = math.inf
        self._has_come = False
        if self._task.done():
            self._task.result()
        return not self._control.stopping.is_set()

    def _tell(self) -> None:
        self._has_come = True
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    @property
    def _drawable(self) -> int:
        return len(self._control.assembler.drawable(self._control.admission.version))

    @property
    def _is_whole(self) -> bool:
        """Whether what is there fills the step."""
        assembler = self._control.assembler
        missing = self._config.groups_per_step - assembler.num_entered
        return assembler.num_ready >= missing and self._drawable == missing

    async def _gather(self) -> None:
        control, stage = self._control, self._stage
        while not (self._is_whole or self._left or control.stopping.is_set()):
            self._is_taking = True
            # All there are: the assembler keeps those that must wait for a later step.
            found = await stage.queue.take(
                stage.name, max_groups=sys.maxsize, columns=(), wait_s=WAIT_S
            )
            self._is_taking = False
            ready = [experience for experience in found if experience.ended is None]
            control.offer(ready)
            ended = await self._book({e.uid: (e.ended, e.info) for e in found if e.ended})
            control.check_ended(ended)
            await drop_late(stage, control)
            control.publishing.check()
            # The end of a group with an earlier deadline frees its place for one that is there.
            if ready or (ended and self._drawable):
                self._tell()
            await self._check()
        if self._is_whole:
            await drop_late(stage, control, is_whole=True)
        while not (self._left or control.stopping.is_set()):
            self._is_taking = True
            farewells = await stage.queue.ended(wait_s=WAIT_S)
            self._is_taking = False
            # However many there are: this step has what it needs.
            await self._book({one.uid: (one.how, one.info) for one in farewells})

    async def _book(
        self, found: Mapping[str, tuple[Ended, GroupInfo | None]]
    ) -> Mapping[str, Ended]:
        """Book groups that have ended, but for those that are on the books already."""
        in_flight = self._control.admission.ledger.in_flight
        ended = {uid: how for uid, (how, _) in found.items() if uid in in_flight}
        if ended:
            infos = {uid: info for uid, (_, info) in found.items()}
            await self._control.end(self._stage.queue, ended, infos)
        return ended

    async def _check(self) -> None:
        """Raise DeadlineError once somebody has waited in vain for too long."""
        # Time for every attempt to be found stalled and taken back, and once as much again.
        attempts = 1 if self._config.on_stall == "abort" else 2 * self._control.max_attempts
        patience_s = self._config.stall_s * attempts
        waits = not self._has_come
        if waits and self._loop.time() > max(self._asked_at, self._control.pulse.at) + patience_s:
            raise await stall_error(
                self._stage, self._control, self._config.groups_per_step, patience_s
            )


async def drop_late(stage: Stage, control: Control, *, is_whole: bool = False) -> None:
    """End the groups that no step can train any more, or none but this one, which is whole."""
    late = control.take_late(is_whole=is_whole)
    if late:
        await control.end(stage.queue, late)


async def stall_error(
    stage: Stage, control: Control, groups_per_step: int, waited_s: float
) -> DeadlineError:
    """The error that says what the step of the current version waits for, and where it is."""
    version = control.admission.version
    uids = control.assembler.awaited
    places = await stage.queue.whereabouts(uids[:8])
    counts = dict(control.admission.ledger.counts.drops)
    drops = f"; dropped so far: {counts}" if counts else ""
    first = "; ".join(f"{uid}: {place}" for uid, place in places.items()) or "no prompt admitted"
    return DeadlineError(
        f"stage {stage.name} got no group for {waited_s:g} s at version {version}: its step has"
        f" {control.assembler.num_entered} of {groups_per_step} groups, and {len(uids)} that were"
        f" admitted are not ready ({first}){drops}"
    )
