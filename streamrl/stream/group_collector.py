"""The groups of one step, taken from the queue as they come, also while others are trained."""

import asyncio
import math
import sys
from collections.abc import Mapping
from types import TracebackType

from streamrl.errors import DeadlineError
from streamrl.messages import GroupInfo, GroupOutcome
from streamrl.stream.protocols import StageContext
from streamrl.stream.run_state import PipelineConfig, RunState
from streamrl.stream.stage_worker import POLL_WAIT_S


class GroupCollector:
    """Offers the assembler what the queue has, until the step of the current version is whole.

    Whoever trains may be busy, or wait for its devices, for long: a group that is filtered
    meanwhile is booked at once, so that another one is sampled in its place, also for later steps
    once this one is whole. What is open when it is left stays in the queue, or with the assembler.
    """

    def __init__(self, stage: StageContext, control: RunState, config: PipelineConfig) -> None:
        self._stage, self._run_state, self._config = stage, control, config
        self._loop = asyncio.get_running_loop()
        self._has_new_groups = False
        """Something has, since somebody last asked."""
        self._waiting_since = math.inf
        """Since when somebody waits for groups."""
        self._waiter: asyncio.Future[None] | None = None
        self._is_taking = self._is_closing = False

    async def __aenter__(self) -> "GroupCollector":
        await drop_late_groups(self._stage, self._run_state)
        self._task = asyncio.create_task(self._collect_groups())
        self._task.add_done_callback(lambda task: self._notify_waiter())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What is being booked is booked to its end, unless whoever trains is cancelled.
        self._is_closing = True
        if self._is_taking or isinstance(error, asyncio.CancelledError):
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (wrong := self._task.exception()) and error is None:
            raise wrong

    async def wait_for_groups(self) -> bool:
        """Wait until something has come that may enter the step; False if the run is stopping.

        Raises DeadlineError naming the groups the step waits for, and where they are, once that
        takes longer than `on_stall` allows, and FilterError or DropError as `RunState.end` does.
        """
        if not (self._has_new_groups or self._task.done() or self._num_drawable):
            self._waiting_since, self._waiter = self._loop.time(), self._loop.create_future()
            await self._waiter
            self._waiting_since = math.inf
        self._has_new_groups = False
        if self._task.done():
            self._task.result()
        return not self._run_state.stop_requested.is_set()

    def _notify_waiter(self) -> None:
        self._has_new_groups = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _num_drawable(self) -> int:
        return len(self._run_state.assembler.find_drawable(self._run_state.admission.version))

    @property
    def _is_step_complete(self) -> bool:
        """Whether what is there fills the step."""
        assembler = self._run_state.assembler
        missing = self._config.groups_per_step - assembler.num_drawn
        return assembler.num_ready >= missing and self._num_drawable == missing

    async def _collect_groups(self) -> None:
        control, stage = self._run_state, self._stage
        while not (self._is_step_complete or self._is_closing or control.stop_requested.is_set()):
            self._is_taking = True
            # All there are: the assembler keeps those that must wait for a later step.
            found = await stage.queue.lease_groups(
                stage.name, max_groups=sys.maxsize, columns=(), wait_s=POLL_WAIT_S
            )
            self._is_taking = False
            ready = [experience for experience in found if experience.outcome is None]
            control.offer_groups(ready)
            ended = await self._record_finished(
                {e.uid: (e.outcome, e.info) for e in found if e.outcome}
            )
            control.check_step_limits(ended)
            await drop_late_groups(stage, control)
            control.publisher.check_failures()
            # The end of a group with an earlier deadline frees its place for one that is there.
            if ready or (ended and self._num_drawable):
                self._notify_waiter()
            await self._check_stall()
        if self._is_step_complete:
            await drop_late_groups(stage, control, is_whole=True)
        while not (self._is_closing or control.stop_requested.is_set()):
            self._is_taking = True
            farewells = await stage.queue.wait_for_finished(wait_s=POLL_WAIT_S)
            self._is_taking = False
            # However many there are: this step has what it needs.
            await self._record_finished({one.uid: (one.outcome, one.info) for one in farewells})

    async def _record_finished(
        self, found: Mapping[str, tuple[GroupOutcome, GroupInfo | None]]
    ) -> Mapping[str, GroupOutcome]:
        """Book groups that have ended, but for those that are on the books already."""
        in_flight = self._run_state.admission.ledger.in_flight
        ended = {uid: how for uid, (how, _) in found.items() if uid in in_flight}
        if ended:
            infos = {uid: info for uid, (_, info) in found.items()}
            await self._run_state.finish_groups(self._stage.queue, ended, infos)
        return ended

    async def _check_stall(self) -> None:
        """Raise DeadlineError once somebody has waited in vain for too long."""
        # Time for every attempt to be found stalled and taken back, and once as much again.
        attempts = 1 if self._config.on_stall == "abort" else 2 * self._run_state.max_attempts
        patience_s = self._config.stall_s * attempts
        waits = not self._has_new_groups
        if (
            waits
            and self._loop.time()
            > max(self._waiting_since, self._run_state.progress_clock.last_progress_at) + patience_s
        ):
            raise await make_stall_error(
                self._stage, self._run_state, self._config.groups_per_step, patience_s
            )


async def drop_late_groups(
    stage: StageContext, control: RunState, *, is_whole: bool = False
) -> None:
    """End the groups that no step can train any more, or none but this one, which is whole."""
    late = control.remove_late_groups(is_whole=is_whole)
    if late:
        await control.finish_groups(stage.queue, late)


async def make_stall_error(
    stage: StageContext, control: RunState, groups_per_step: int, waited_s: float
) -> DeadlineError:
    """The error that says what the step of the current version waits for, and where it is."""
    version = control.admission.version
    uids = control.assembler.pending_uids
    places = await stage.queue.locate_groups(uids[:8])
    counts = dict(control.admission.ledger.counts.drops)
    drops = f"; dropped so far: {counts}" if counts else ""
    first = "; ".join(f"{uid}: {place}" for uid, place in places.items()) or "no prompt admitted"
    return DeadlineError(
        f"stage {stage.name} got no group for {waited_s:g} s at version {version}: its step has"
        f" {control.assembler.num_drawn} of {groups_per_step} groups, and {len(uids)} that were"
        f" admitted are not ready ({first}){drops}"
    )
