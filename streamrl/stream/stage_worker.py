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
from streamrl.dataflow import GREEDY
from streamrl.errors import StreamError
from streamrl.messages import Columns, Experience, Filtered, Lease
from streamrl.stream.protocols import Begun, Stage

Result = Columns | Filtered | StreamError
"""What a stage makes of a group: columns, a reason to leave it out, or an error to be counted."""
Compute = Callable[[Sequence[Experience]], Awaitable[Sequence[Result]]]

WAIT_S = 1.0
"""Length of one wait in a loop, s: a loop looks up this often to see whether the run has ended."""
LOOK_UP_S = 0.25
"""How often a stage that holds nothing looks whether it has something to renew, s."""
PROGRESS_S = 2.0
"""How much of its work on a group a stage may lose by its death, s."""
GATHER_S = 0.003
"""How long a result waits for others to be committed with it, s: a message costs about as much."""


@dataclass(eq=False, slots=True)
class Places:
    """How much a stage may have under way: each completion of a group, or the group, has a place.

    A group more is begun while one is `free`: there are less than none while some wait for one.
    """

    free: int
    per_group: int = 1

    @property
    def room(self) -> int:
        """How many groups more may be begun."""
        return max(0, -(-self.free // self.per_group))


def shared_places(count: int, stages: Iterable[str], *, group_size: int) -> dict[str, Places]:
    """Those of stages that sample side by side: of each prompt a group, or a greedy completion.

    Each stage has its part of them, one at least: none is ahead of the others for long.
    """
    completions = {stage: 1 if stage == GREEDY.stage else group_size for stage in stages}
    whole = sum(completions.values())
    return {
        stage: Places(max(1, count * per_group // whole), per_group)
        for stage, per_group in completions.items()
    }


async def nothing_begun() -> Mapping[str, Columns]:
    """What a stage has begun that makes its columns in one go."""
    return {}


async def serve(
    stage: Stage,
    compute: Compute,
    desk: "Desk",
    *,
    columns: Sequence[str],
    batch: int,
    notes: "Notes | None" = None,
) -> None:
    """Take groups, compute, put the results: as many as `desk` has room for, `batch` to a call.

    Ends once the stage is to leave: what is finished is committed then, and what is begun lies with
    the queue. The leases are still held; the queue's `release` gives them back.
    """
    queue = stage.queue
    notes = notes or Notes(queue, nothing_begun)
    async with asyncio.TaskGroup() as tasks:
        outbox = Outbox(queue, desk)

        async def work(experiences: Sequence[Experience]) -> None:
            results = await compute(experiences)
            for experience, result in zip(experiences, results, strict=True):
                outbox.post(experience.lease, result)

        async def take_on() -> None:
            while True:
                most, name = await desk.room(), stage.name
                taken = await queue.take(name, max_groups=most, columns=columns, wait_s=WAIT_S)
                for chunk in chunks(taken, batch):
                    desk.begin(chunk, tasks.create_task(work(chunk)))

        loops = (outbox.deliver(), keep_leases(queue, desk), notes.keep(), take_on())
        *others, taking = [tasks.create_task(loop) for loop in loops]
        await stage.leaving.wait()
        taking.cancel()
        queue.withdraw()
        begun = await notes.look()
        # At once, or it would go on from what it has told already.
        desk.close()
        await queue.note(begun)
        await outbox.emptied()
        for task in others:
            task.cancel()


async def keep_leases(queue: ExperienceQueue, desk: "Desk") -> None:
    """Renew what is held, without end. Work whose lease was lost is in vain, and cancelled."""
    while True:
        every_s = queue.renew_every_s
        await asyncio.sleep(LOOK_UP_S if math.isinf(every_s) else every_s)
        for lease in await queue.renew():
            desk.abandon(lease)


@dataclass
class _Work:
    """What a task works on, and the places it has."""

    leases: set[Lease]
    places: int


class Desk:
    """The work a stage has under way, and how much more it may take on."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._tasks: dict[asyncio.Task[None], _Work] = {}
        self._given = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether the stage works on nothing."""
        return not self._tasks

    async def room(self) -> int:
        """How many groups more, waiting for one: bounded by the deadlines of the work at hand."""
        while not self._places.room:
            self._given.clear()
            await self._given.wait()
        return self._places.room

    def begin(self, experiences: Sequence[Experience], task: asyncio.Task[None]) -> None:
        """A task works on these groups until it ends, however that may be."""
        places = len(experiences) * self._places.per_group
        self._places.free -= places
        self._tasks[task] = _Work({experience.lease for experience in experiences}, places)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        work = self._tasks.pop(task)
        places, work.places = work.places, 0
        self._give_back(places)

    def _give_back(self, places: int) -> None:
        self._places.free += places
        self._given.set()

    def clearing(self) -> Callable[[], None]:
        """To be called for each completion that the calling task has finished: its place is free.

        Those that are left come back with its end.
        """
        work = self._tasks[asyncio.current_task()]  # type: ignore[index]

        def clear() -> None:
            if work.places:
                work.places -= 1
                self._give_back(1)

        return clear

    def close(self) -> None:
        """End all work."""
        for task in self._tasks:
            task.cancel()

    def abandon(self, lease: Lease) -> None:
        """This lease is void; the task ends once all of its leases are."""
        for task, work in self._tasks.items():
            work.leases.discard(lease)
            if not work.leases:
                task.cancel()


class Outbox:
    """Commits results, those that are finished close together in one commit."""

    def __init__(self, queue: ExperienceQueue, desk: Desk) -> None:
        self._queue = queue
        self._desk = desk
        self._posted: asyncio.Queue[tuple[Lease, Result]] = asyncio.Queue()

    def post(self, lease: Lease, result: Result) -> None:
        """Hand in the result of a leased group."""
        self._posted.put_nowait((lease, result))

    async def deliver(self) -> None:
        """Put, filter and fail what was posted, without end. The queue refuses what is late."""
        while True:
            batch = [await self._posted.get()]
            # The work that this came of may be at its end, though its places are not free yet.
            await asyncio.sleep(0)
            if not self._desk.is_empty:
                await asyncio.sleep(GATHER_S)
            while not self._posted.empty():
                batch.append(self._posted.get_nowait())
            failed = [(lease, r) for lease, r in batch if isinstance(r, StreamError)]
            filtered = [(lease, r) for lease, r in batch if isinstance(r, Filtered)]
            done = [(le, r) for le, r in batch if not isinstance(r, StreamError | Filtered)]
            if done:
                await self._queue.put(done)
            if filtered:
                await self._queue.filter(filtered)
            if failed:
                await self._queue.fail(failed)
            for _ in batch:
                self._posted.task_done()

    async def emptied(self) -> None:
        """Wait until all that was posted is with the queue."""
        await self._posted.join()


@dataclass
class _Pace:
    """Since when a group is worked on, and when its next note is due, s of the loop's clock."""

    since: float
    due: float


class Notes:
    """Leaves with the queue what a stage has made so far of each group it works on.

    Every PROGRESS_S from when work on the group began: groups that take less cost nothing. `begun`
    says, by uid, what there is.
    """

    def __init__(self, queue: ExperienceQueue, begun: Begun) -> None:
        self._queue = queue
        self._begun = begun
        self._paces: dict[Lease, _Pace] = {}

    @contextmanager
    def of(self, lease: Lease) -> Iterator[None]:
        """Meanwhile this group is worked on."""
        now = asyncio.get_running_loop().time()
        self._paces[lease] = _Pace(now, now + PROGRESS_S)
        try:
            yield
        finally:
            del self._paces[lease]

    async def keep(self) -> None:
        """Note what is due, without end."""
        clock = asyncio.get_running_loop().time
        while True:
            # What begins meanwhile is due later than the end of this sleep.
            first = min((pace.due for pace in self._paces.values()), default=math.inf)
            await asyncio.sleep(min(first - clock(), PROGRESS_S))
            due = self._due(clock())
            if due:
                found = await self.look()
                await self._queue.note([(lease, told) for lease, told in found if lease in due])

    def _due(self, now: float) -> set[Lease]:
        """What is to be noted now: those that were noted before come along if they soon are due."""
        if all(pace.due > now for pace in self._paces.values()):
            return set()
        chosen = set()
        for lease, pace in self._paces.items():
            is_first = pace.due <= pace.since + PROGRESS_S
            if pace.due <= now or (not is_first and pace.due <= now + PROGRESS_S / 2):
                pace.due = now + PROGRESS_S
                chosen.add(lease)
        return chosen

    async def look(self) -> list[tuple[Lease, Columns]]:
        """What has been begun of all that is worked on."""
        if not self._paces:
            return []
        found = await self._begun()
        return [(lease, found[lease.uid]) for lease in self._paces if lease.uid in found]


def chunks(taken: Sequence[Experience], size: int) -> list[Sequence[Experience]]:
    """Groups that are worked on together: at most `size`, and each that failed before by itself.

    One that never ends, or ends its process, must not take the same others along each time.
    """
    alone = [[one] for one in taken if one.lease.attempt > 1]
    fresh = [one for one in taken if one.lease.attempt == 1]
    return [*alone, *(fresh[i : i + size] for i in range(0, len(fresh), size))]
