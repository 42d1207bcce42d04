"""How a stage works off the queue: take, compute, commit what came of it, keep what is held.

The same for every stage that adds columns: generation and all scorers. Where a group takes long,
what has been made of it so far is left with the queue now and then: it survives its maker.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from streamrl.buffer import ExperienceQueue
from streamrl.dataflow import GREEDY_CALL
from streamrl.errors import StreamError
from streamrl.messages import Columns, Experience, FilteredGroup, GroupLease
from streamrl.stream.protocols import ReadPartialRollouts, StageContext

StageResult = Columns | FilteredGroup | StreamError
"""What a stage makes of a group: columns, a reason to leave it out, or an error to be counted."""
ComputeFunction = Callable[[Sequence[Experience]], Awaitable[Sequence[StageResult]]]

POLL_WAIT_S = 1.0
"""Length of one wait in a loop, s: a loop looks up this often to see whether the run has ended."""
IDLE_RENEW_INTERVAL_S = 0.25
"""How often a stage that holds nothing looks whether it has something to renew, s."""
PARTIAL_SAVE_INTERVAL_S = 2.0
"""How much of its work on a group a stage may lose by its death, s."""
COMMIT_BATCH_DELAY_S = 0.003
"""How long a result waits for others to be committed with it, s: a message costs about as much."""


@dataclass(eq=False, slots=True)
class ConcurrencyLimit:
    """How much a stage may have under way: each completion of a group, or the group, has a place.

    A group more is begun while one is `free_slots`: there are less than none while some wait for
    one.
    """

    free_slots: int
    slots_per_group: int = 1

    @property
    def available_groups(self) -> int:
        """How many groups more may be begun."""
        return max(0, -(-self.free_slots // self.slots_per_group))


def split_slots(
    count: int, stages: Iterable[str], *, group_size: int
) -> dict[str, ConcurrencyLimit]:
    """Those of stages that sample side by side: of each prompt a group, or a greedy completion.

    Each stage has its part of them, one at least: none is ahead of the others for long.
    """
    completions = {stage: 1 if stage == GREEDY_CALL.stage else group_size for stage in stages}
    whole = sum(completions.values())
    return {
        stage: ConcurrencyLimit(max(1, count * per_group // whole), per_group)
        for stage, per_group in completions.items()
    }


async def read_no_partials() -> Mapping[str, Columns]:
    """What a stage has begun that makes its columns in one go."""
    return {}


async def serve_stage(
    stage: StageContext,
    compute: ComputeFunction,
    desk: "InFlightWork",
    *,
    columns: Sequence[str],
    batch: int,
    notes: "PartialRolloutSaver | None" = None,
) -> None:
    """Take groups, compute, put the results: as many as `desk` has room for, `batch` to a call.

    Ends once the stage is to leave: what is finished is committed then, and what is begun lies with
    the queue. The leases are still held; the queue's `release` gives them back.
    """
    queue = stage.queue
    notes = notes or PartialRolloutSaver(queue, read_no_partials)
    async with asyncio.TaskGroup() as tasks:
        outbox = CommitBatcher(queue, desk)

        async def work(experiences: Sequence[Experience]) -> None:
            results = await compute(experiences)
            for experience, result in zip(experiences, results, strict=True):
                outbox.add_result(experience.lease, result)

        async def take_on() -> None:
            while True:
                most, name = await desk.wait_for_slots(), stage.name
                taken = await queue.lease_groups(
                    name, max_groups=most, columns=columns, wait_s=POLL_WAIT_S
                )
                for chunk in split_batches(taken, batch):
                    desk.add_task(chunk, tasks.create_task(work(chunk)))

        loops = (
            outbox.commit_results(),
            renew_leases(queue, desk),
            notes.save_periodically(),
            take_on(),
        )
        *others, taking = [tasks.create_task(loop) for loop in loops]
        await stage.leave_requested.wait()
        taking.cancel()
        queue.cancel_requests()
        begun = await notes.read_partials()
        # At once, or it would go on from what it has told already.
        desk.cancel_tasks()
        await queue.save_partials(begun)
        await outbox.wait_until_empty()
        for task in others:
            task.cancel()


async def renew_leases(queue: ExperienceQueue, desk: "InFlightWork") -> None:
    """Renew what is held, without end. Work whose lease was lost is in vain, and cancelled."""
    while True:
        every_s = queue.renew_interval_s
        await asyncio.sleep(IDLE_RENEW_INTERVAL_S if math.isinf(every_s) else every_s)
        for lease in await queue.renew_leases():
            desk.abandon_lease(lease)


@dataclass
class _InFlightTask:
    """What a task works on, and the places it has."""

    leases: set[GroupLease]
    num_slots: int


class InFlightWork:
    """The work a stage has under way, and how much more it may take on."""

    def __init__(self, places: ConcurrencyLimit) -> None:
        self._limit = places
        self._tasks: dict[asyncio.Task[None], _InFlightTask] = {}
        self._slots_freed = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether the stage works on nothing."""
        return not self._tasks

    async def wait_for_slots(self) -> int:
        """How many groups more, waiting for one: bounded by the deadlines of the work at hand."""
        while not self._limit.available_groups:
            self._slots_freed.clear()
            await self._slots_freed.wait()
        return self._limit.available_groups

    def add_task(self, experiences: Sequence[Experience], task: asyncio.Task[None]) -> None:
        """A task works on these groups until it ends, however that may be."""
        places = len(experiences) * self._limit.slots_per_group
        self._limit.free_slots -= places
        self._tasks[task] = _InFlightTask({experience.lease for experience in experiences}, places)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        work = self._tasks.pop(task)
        places, work.num_slots = work.num_slots, 0
        self._release_slots(places)

    def _release_slots(self, places: int) -> None:
        self._limit.free_slots += places
        self._slots_freed.set()

    def make_slot_releaser(self) -> Callable[[], None]:
        """To be called for each completion that the calling task has finished: its place is free.

        Those that are left come back with its end.
        """
        work = self._tasks[asyncio.current_task()]  # type: ignore[index]

        def clear() -> None:
            if work.num_slots:
                work.num_slots -= 1
                self._release_slots(1)

        return clear

    def cancel_tasks(self) -> None:
        """End all work."""
        for task in self._tasks:
            task.cancel()

    def abandon_lease(self, lease: GroupLease) -> None:
        """This lease is void; the task ends once all of its leases are."""
        for task, work in self._tasks.items():
            work.leases.discard(lease)
            if not work.leases:
                task.cancel()


class CommitBatcher:
    """Commits results, those that are finished close together in one commit."""

    def __init__(self, queue: ExperienceQueue, desk: InFlightWork) -> None:
        self._queue = queue
        self._in_flight = desk
        self._results: asyncio.Queue[tuple[GroupLease, StageResult]] = asyncio.Queue()

    def add_result(self, lease: GroupLease, result: StageResult) -> None:
        """Hand in the result of a leased group."""
        self._results.put_nowait((lease, result))

    async def commit_results(self) -> None:
        """Put, filter and fail what was posted, without end. The queue refuses what is late."""
        while True:
            batch = [await self._results.get()]
            # The work that this came of may be at its end, though its places are not free yet.
            await asyncio.sleep(0)
            if not self._in_flight.is_empty:
                await asyncio.sleep(COMMIT_BATCH_DELAY_S)
            while not self._results.empty():
                batch.append(self._results.get_nowait())
            failed = [(lease, r) for lease, r in batch if isinstance(r, StreamError)]
            filtered = [(lease, r) for lease, r in batch if isinstance(r, FilteredGroup)]
            done = [(le, r) for le, r in batch if not isinstance(r, StreamError | FilteredGroup)]
            if done:
                await self._queue.commit_columns(done)
            if filtered:
                await self._queue.filter_groups(filtered)
            if failed:
                await self._queue.fail_groups(failed)
            for _ in batch:
                self._results.task_done()

    async def wait_until_empty(self) -> None:
        """Wait until all that was posted is with the queue."""
        await self._results.join()


@dataclass
class _SaveSchedule:
    """Since when a group is worked on, and when its next note is due, s of the loop's clock."""

    started_at: float
    due_at: float


class PartialRolloutSaver:
    """Leaves with the queue what a stage has made so far of each group it works on.

    Every PROGRESS_S from when work on the group began: groups that take less cost nothing. `begun`
    says, by uid, what there is.
    """

    def __init__(self, queue: ExperienceQueue, begun: ReadPartialRollouts) -> None:
        self._queue = queue
        self._read_partial_rollouts = begun
        self._schedules: dict[GroupLease, _SaveSchedule] = {}

    @contextmanager
    def track_lease(self, lease: GroupLease) -> Iterator[None]:
        """Meanwhile this group is worked on."""
        now = asyncio.get_running_loop().time()
        self._schedules[lease] = _SaveSchedule(now, now + PARTIAL_SAVE_INTERVAL_S)
        try:
            yield
        finally:
            del self._schedules[lease]

    async def save_periodically(self) -> None:
        """Note what is due, without end."""
        clock = asyncio.get_running_loop().time
        while True:
            # What begins meanwhile is due later than the end of this sleep.
            first = min((pace.due_at for pace in self._schedules.values()), default=math.inf)
            await asyncio.sleep(min(first - clock(), PARTIAL_SAVE_INTERVAL_S))
            due = self._select_due(clock())
            if due:
                found = await self.read_partials()
                await self._queue.save_partials(
                    [(lease, told) for lease, told in found if lease in due]
                )

    def _select_due(self, now: float) -> set[GroupLease]:
        """What is to be noted now: those that were noted before come along if they soon are due."""
        if all(pace.due_at > now for pace in self._schedules.values()):
            return set()
        chosen = set()
        for lease, pace in self._schedules.items():
            is_first = pace.due_at <= pace.started_at + PARTIAL_SAVE_INTERVAL_S
            if pace.due_at <= now or (
                not is_first and pace.due_at <= now + PARTIAL_SAVE_INTERVAL_S / 2
            ):
                pace.due_at = now + PARTIAL_SAVE_INTERVAL_S
                chosen.add(lease)
        return chosen

    async def read_partials(self) -> list[tuple[GroupLease, Columns]]:
        """What has been begun of all that is worked on."""
        if not self._schedules:
            return []
        found = await self._read_partial_rollouts()
        return [(lease, found[lease.uid]) for lease in self._schedules if lease.uid in found]


def split_batches(taken: Sequence[Experience], size: int) -> list[Sequence[Experience]]:
    """Groups that are worked on together: at most `size`, and each that failed before by itself.

    One that never ends, or ends its process, must not take the same others along each time.
    """
    alone = [[one] for one in taken if one.lease.attempt > 1]
    fresh = [one for one in taken if one.lease.attempt == 1]
    return [*alone, *(fresh[i : i + size] for i in range(0, len(fresh), size))]
