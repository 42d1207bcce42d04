"""Serve a stage: lease groups, compute, commit the results, renew the leases meanwhile.

Generation and all scorers run this loop. Long-running stages also save partial rollouts in the
queue, where they survive the death of the process.
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

COMMITTED = None
StageResult = Columns | FilteredGroup | StreamError | None
"""Result for a group: columns, a filter verdict, or an error that counts as a failed attempt.

COMMITTED if other processes, the ranks of a model, have committed the columns already.
"""
ComputeFunction = Callable[[Sequence[Experience]], Awaitable[Sequence[StageResult]]]

POLL_WAIT_S = 1.0
"""Length of a single wait in a loop, s; between waits a loop checks whether the run has ended."""
IDLE_RENEW_INTERVAL_S = 0.25
"""Interval at which a stage without leases checks for new leases, s."""
PARTIAL_SAVE_INTERVAL_S = 2.0
"""Interval between saves of partial rollouts, s: work that the death of a process may lose."""
COMMIT_BATCH_DELAY_S = 0.003
"""Delay to batch results into one commit, s; a message costs about as much."""


@dataclass(eq=False, slots=True)
class ConcurrencyLimit:
    """Limit of a stage's work in flight, in slots: one per completion, or one per group.

    A new group starts while any slot is free, even if it needs more: `free_slots` is negative while
    completions wait for a slot in the engine.
    """

    free_slots: int
    slots_per_group: int = 1

    @property
    def available_groups(self) -> int:
        """Number of groups that may start now."""
        return max(0, -(-self.free_slots // self.slots_per_group))


def split_slots(
    count: int, stages: Iterable[str], *, group_size: int
) -> dict[str, ConcurrencyLimit]:
    """Divide a generator's `count` slots between its stages: groups and greedy completions.

    Stages get slots in proportion to their completions per prompt, at least one, so that no stage
    runs far ahead.

    Example: count=36, group_size=8, stages generate and greedy: 32 slots and 4 slots.
    """
    completions = {stage: 1 if stage == GREEDY_CALL.stage else group_size for stage in stages}
    per_prompt = sum(completions.values())
    return {
        stage: ConcurrencyLimit(max(1, count * per_group // per_prompt), per_group)
        for stage, per_group in completions.items()
    }


async def read_no_partials() -> Mapping[str, Columns]:
    """Return no partial rollouts, for stages that do not save them."""
    return {}


async def serve_stage(
    stage: StageContext,
    compute: ComputeFunction,
    in_flight: "InFlightWork",
    *,
    columns: Sequence[str],
    batch: int,
    partial_saver: "PartialRolloutSaver | None" = None,
) -> None:
    """Run a stage until it must leave: lease groups, compute, commit results, renew leases.

    compute: called with at most `batch` groups at a time.
    in_flight: limits the number of groups in work.
    columns: names of the columns to lease.

    Returns after `stage.leave_requested`: finished work is committed, partial rollouts are saved.
    Leases stay active; the caller releases them with `queue.release_holder`.
    """
    queue = stage.queue
    partial_saver = partial_saver or PartialRolloutSaver(queue, read_no_partials)
    async with asyncio.TaskGroup() as tasks:
        committer = CommitBatcher(queue, in_flight)

        async def work(experiences: Sequence[Experience]) -> None:
            results = await compute(experiences)
            for experience, result in zip(experiences, results, strict=True):
                committer.add_result(experience.lease, result)

        async def lease_work() -> None:
            while True:
                max_groups, name = await in_flight.wait_for_slots(), stage.name
                experiences = await queue.lease_groups(
                    name, max_groups=max_groups, columns=columns, wait_s=POLL_WAIT_S
                )
                for chunk in split_batches(experiences, batch):
                    in_flight.add_task(chunk, tasks.create_task(work(chunk)))

        loops = (
            committer.commit_results(),
            renew_leases(queue, in_flight),
            partial_saver.save_periodically(),
            lease_work(),
        )
        *other_loops, leasing = [tasks.create_task(loop) for loop in loops]
        await stage.leave_requested.wait()
        leasing.cancel()
        queue.cancel_requests()
        partials = await partial_saver.read_partials()
        # Cancel before the next await: otherwise work would continue past the saved state.
        in_flight.cancel_tasks()
        await queue.save_partials(partials)
        await committer.wait_until_empty()
        for task in other_loops:
            task.cancel()


async def renew_leases(queue: ExperienceQueue, in_flight: "InFlightWork") -> None:
    """Renew the active leases of a stage until cancelled; cancel work that has lost its lease."""
    while True:
        interval_s = queue.renew_interval_s
        await asyncio.sleep(IDLE_RENEW_INTERVAL_S if math.isinf(interval_s) else interval_s)
        for lease in await queue.renew_leases():
            in_flight.abandon_lease(lease)


@dataclass
class _InFlightTask:
    leases: set[GroupLease]
    num_slots: int


class InFlightWork:
    """Tasks of a stage that work on leased groups, and the slots that they occupy.

    max_tasks: no group is leased while so many tasks run; those that become ready meanwhile are
      leased together.
    """

    def __init__(self, limit: ConcurrencyLimit, max_tasks: float = math.inf) -> None:
        self._limit = limit
        self._max_tasks = max_tasks
        self._tasks: dict[asyncio.Task[None], _InFlightTask] = {}
        self._slots_freed = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._tasks

    async def wait_for_slots(self) -> int:
        """Wait until a group may start; return the number of groups that may.

        The wait has no timeout: deadlines bound the work that occupies the slots.
        """
        while not self._limit.available_groups or len(self._tasks) >= self._max_tasks:
            self._slots_freed.clear()
            await self._slots_freed.wait()
        return self._limit.available_groups

    def add_task(self, experiences: Sequence[Experience], task: asyncio.Task[None]) -> None:
        """Track a task that works on leased groups; the end of the task frees its slots."""
        slots = len(experiences) * self._limit.slots_per_group
        self._limit.free_slots -= slots
        self._tasks[task] = _InFlightTask({experience.lease for experience in experiences}, slots)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        work = self._tasks.pop(task)
        slots, work.num_slots = work.num_slots, 0
        self._release_slots(slots)

    def _release_slots(self, count: int) -> None:
        self._limit.free_slots += count
        self._slots_freed.set()

    def make_slot_releaser(self) -> Callable[[], None]:
        """Return a function that the current task calls for each finished completion.

        Each call frees one slot. Remaining slots are released when the task ends.
        """
        work = self._tasks[asyncio.current_task()]  # type: ignore[index]

        def release_slot() -> None:
            if work.num_slots:
                work.num_slots -= 1
                self._release_slots(1)

        return release_slot

    def cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def abandon_lease(self, lease: GroupLease) -> None:
        """Drop a lost lease; cancel its task once all leases of the task are lost."""
        for task, work in self._tasks.items():
            work.leases.discard(lease)
            if not work.leases:
                task.cancel()


class CommitBatcher:
    """Commits a stage's results to the queue; results that finish close together share a call."""

    def __init__(self, queue: ExperienceQueue, in_flight: InFlightWork) -> None:
        self._queue = queue
        self._in_flight = in_flight
        self._results: asyncio.Queue[tuple[GroupLease, StageResult]] = asyncio.Queue()

    def add_result(self, lease: GroupLease, result: StageResult) -> None:
        self._results.put_nowait((lease, result))

    async def commit_results(self) -> None:
        """Commit results as they are added, until cancelled."""
        while True:
            batch = [await self._results.get()]
            # Let the finished task end first, so that its slots are free.
            await asyncio.sleep(0)
            if not self._in_flight.is_empty:
                await asyncio.sleep(COMMIT_BATCH_DELAY_S)
            while not self._results.empty():
                batch.append(self._results.get_nowait())
            failed = [(lease, r) for lease, r in batch if isinstance(r, StreamError)]
            filtered = [(lease, r) for lease, r in batch if isinstance(r, FilteredGroup)]
            self._queue.forget_leases(lease for lease, r in batch if r is COMMITTED)
            done = [(lease, r) for lease, r in batch if isinstance(r, Mapping)]
            if done:
                await self._queue.commit_columns(done)
            if filtered:
                await self._queue.filter_groups(filtered)
            if failed:
                await self._queue.fail_groups(failed)
            for _ in batch:
                self._results.task_done()

    async def wait_until_empty(self) -> None:
        """Wait until all results added so far are committed."""
        await self._results.join()


class PartialRolloutSaver:
    """Saves the partial rollouts of running groups in the queue.

    A group is saved at least every PARTIAL_SAVE_INTERVAL_S after its start. A read delays all
    groups of the generator, so one that is due takes along all of at least half the interval.
    """

    def __init__(self, queue: ExperienceQueue, read_partials: ReadPartialRollouts) -> None:
        self._queue = queue
        self._read_partial_rollouts = read_partials
        self._saved_at: dict[GroupLease, float] = {}
        """Last save, or start of the work, of each tracked lease, event loop time."""

    @contextmanager
    def track_lease(self, lease: GroupLease) -> Iterator[None]:
        """Save partial rollouts of this lease's group while the context is active."""
        self._saved_at[lease] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._saved_at[lease]

    async def save_periodically(self) -> None:
        """Save the partial rollouts of tracked leases when due, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            pause_s = PARTIAL_SAVE_INTERVAL_S / 4
            await asyncio.sleep(pause_s)
            now = clock()
            # Wait until a lease would be late after the next pause.
            if all(at > now + pause_s - PARTIAL_SAVE_INTERVAL_S for at in self._saved_at.values()):
                continue
            last_due = now - PARTIAL_SAVE_INTERVAL_S / 2
            due = {lease for lease, saved_at in self._saved_at.items() if saved_at <= last_due}
            self._saved_at |= dict.fromkeys(due, now)
            partials = await self.read_partials()
            await self._queue.save_partials(
                [(lease, columns) for lease, columns in partials if lease in due]
            )

    async def read_partials(self) -> list[tuple[GroupLease, Columns]]:
        """Return the partial rollouts of all tracked leases that have any."""
        if not self._saved_at:
            return []
        partials = await self._read_partial_rollouts()
        return [(lease, partials[lease.uid]) for lease in self._saved_at if lease.uid in partials]


def split_batches(experiences: Sequence[Experience], size: int) -> list[Sequence[Experience]]:
    """Split groups into batches of at most `size`; retried groups form batches of one.

    A group that hangs or crashes the process must not make the same other groups fail each time.
    """
    retried = [[e] for e in experiences if e.lease.attempt > 1]
    first_attempts = [e for e in experiences if e.lease.attempt == 1]
    batches = (first_attempts[i : i + size] for i in range(0, len(first_attempts), size))
    return [*retried, *batches]
