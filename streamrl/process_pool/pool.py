"""A pool of workers: calls in, answers out; what hangs, crashes or grows is killed and replaced.

A call has its deadline from when a worker begins with it, not from when it was made. One that takes
far longer than others no longer holds its place: while calls wait, a spare worker stands in for it,
and its process runs at the lowest priority, so that the others go on as before.

Where several calls share a worker, it may end without a sign of which one was at fault. Each of
them is then made again in a worker that it has to itself; only there is it blamed.
"""

import asyncio
import contextlib
import itertools
import logging
import statistics
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from streamrl.errors import ConfigError
from streamrl.process_pool.proc_stats import ProcessTable
from streamrl.process_pool.process import Process, ProcessEndedError

T = TypeVar("T")
_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Deadline of a worker's start, s: it imports a user's file, and that may import torch."""
STARTS = 3
"""So many workers in a row may fail to start before calls are told so."""
LOOK_EVERY_S = 0.5
"""How often memory and stragglers are looked at, s."""
STRAGGLER_S, STRAGGLER_RATIO = 1.0, 5.0
"""A call takes far longer than others from so many seconds, and so many times their median."""
MAX_SPARES = 8
"""Most workers that stand in for stragglers."""
CANCEL_S = 1.0
"""An async call has this long to end once it is cancelled, s; then its worker is killed."""


class WorkerError(Exception):
    """A call came to nothing; the text is what its handler raised."""


class _UnblamedError(Exception):
    """Its worker ended while it had other calls too."""


class WorkerTimeoutError(WorkerError):
    """It took longer than it may; nothing of it runs any more."""


class WorkerCrashError(WorkerError):
    """Its process ended."""


class WorkerMemoryError(WorkerError):
    """Its process took more memory than it may, and was killed."""


@dataclass(frozen=True)
class WorkerSettings:
    """How a pool runs.

    replicas: worker processes. concurrency: calls at once in a worker whose handler is async; one
    whose handler is not has one at a time. timeout_s: deadline of a call. memory_bytes: most a
    worker may take, with all it started.
    """

    replicas: int
    concurrency: int
    timeout_s: float
    memory_bytes: int


@dataclass
class _Worker:
    """A process and what it is at: the start of each call, s of the loop's clock.

    `lent`: one call has it to itself. `was_shared`: it had several calls when it was ended.
    """

    process: Process
    calls: dict[int, float]
    slots: int
    straggles: bool = False
    lent: bool = False
    was_shared: bool = False
    verdict: WorkerError | None = None

    @property
    def has_room(self) -> bool:
        is_open = not self.straggles and not self.lent and self.verdict is None
        return is_open and len(self.calls) < self.slots


class WorkerPool:
    """Workers that all hold what `target`, "module:function", makes of `payload`.

    `name` is what messages call it. `killed` counts the workers ended, by cause.
    """

    def __init__(self, name: str, target: str, payload: Any, settings: WorkerSettings) -> None:
        self._name = name
        self._target = target
        self._payload = payload
        self._settings = settings
        self._workers: list[_Worker] = []
        self._starting = 0
        self._failed_starts: list[str] = []
        self._changed = asyncio.Condition()
        self._line, self._line_alone = asyncio.Lock(), asyncio.Lock()
        self._alone = 0
        self._is_shared = False
        self._numbers = itertools.count()
        self._took: deque[float] = deque(maxlen=100)
        self._background: set[asyncio.Task[Any]] = set()
        self._own: set[asyncio.Task[None]] = set()
        self._table = ProcessTable()
        self._closed = False
        self.killed: Counter[str] = Counter()

    async def start(self) -> None:
        """Start one worker and what looks after all. Raises ConfigError as the target's load does.

        Raises WorkerCrashError if it ends before it is ready, or is not within START_TIMEOUT_S.
        """
        self._starting += 1
        await self._add()
        self._own.add(self._keep(self._look_after()))

    async def call(self, request: Any, *, alone: bool = False) -> Any:
        """What the handler answers. Raises WorkerError, or one of its kinds, if it does not.

        `alone` gives it a worker to itself: a call that has failed may do so again. A call whose
        caller is cancelled goes on to its answer or its deadline: its worker is neither free before
        that, nor to blame.
        """
        try:
            return await self._made(request, alone=alone and self._is_shared)
        except _UnblamedError:
            return await self._made(request, alone=True)

    async def _made(self, request: Any, *, alone: bool) -> Any:
        self._alone += alone
        try:
            worker, number = await self._claim(alone=alone)
        finally:
            self._alone -= alone
        return await asyncio.shield(self._keep(self._ask(worker, number, request)))

    async def _ask(self, worker: _Worker, number: int, request: Any) -> Any:
        began, clock = worker.calls[number], asyncio.get_running_loop().time
        timeout_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ok, answer = await worker.process.ask(number, request)
        except TimeoutError:
            if not await self._stop(worker, number) and worker.was_shared:
                raise _UnblamedError from None
            raise WorkerTimeoutError(f"no result in {timeout_s:g} s") from None
        except ProcessEndedError:
            self._end(worker, WorkerCrashError(worker.process.how_it_ended), "crash")
            assert worker.verdict is not None
            if worker.was_shared:
                raise _UnblamedError from None
            raise type(worker.verdict)(str(worker.verdict)) from None
        finally:
            del worker.calls[number]
            was_lent, worker.lent = worker.lent, False
            # Of one that straggled the priority cannot be given back to it.
            if not worker.calls and (worker.straggles or (was_lent and self._missing < 0)):
                self._retire(worker)
            await self._tell()
        self._took.append(clock() - began)
        if not ok:
            raise WorkerError(answer)
        return answer

    async def _stop(self, worker: _Worker, number: int) -> bool:
        """End one call: by itself where the handler is async and reacts, else with its worker.

        Whether it reacted: another call may hold up all of its worker, which is no fault of this.
        """
        if worker.slots > 1 and await worker.process.cancel(number, within_s=CANCEL_S):
            self.killed["timeout"] += 1
            return True
        self._end(worker, WorkerTimeoutError("a call could not be ended"), "timeout")
        return False

    def _free(self, *, alone: bool) -> list[_Worker]:
        """Workers with room; an idle one is for those first who want it to themselves."""
        free = [worker for worker in self._workers if worker.has_room]
        if alone:
            return [worker for worker in free if not worker.calls]
        return [worker for worker in free if worker.calls or not self._line_alone.locked()]

    async def _claim(self, *, alone: bool) -> tuple[_Worker, int]:
        """A worker with room, and the number of a call begun in it: first come, first served."""
        async with self._line_alone if alone else self._line:
            while not (free := self._free(alone=alone)):
                if self._closed:
                    raise WorkerCrashError(f"the workers of {self._name} are closed")
                if len(self._failed_starts) >= STARTS:
                    raise WorkerCrashError(
                        f"its worker does not start: {self._failed_starts.pop()}"
                    )
                self._grow()
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_EVERY_S):
                            await self._changed.wait()
            worker, number = min(free, key=lambda one: len(one.calls)), next(self._numbers)
            worker.lent = alone
            worker.calls[number] = asyncio.get_running_loop().time()
            return worker, number

    async def _tell(self) -> None:
        """Something has changed for who waits for a worker."""
        async with self._changed:
            self._changed.notify_all()

    def _grow(self) -> None:
        """Start one more worker, if there are to be more."""
        if self._missing > 0:
            self._starting += 1
            self._own.add(self._keep(self._try_to_add()))

    @property
    def _missing(self) -> int:
        """Workers that there should be beside those there are."""
        replicas = self._settings.replicas
        straggling = sum(worker.straggles for worker in self._workers)
        alone = self._alone + sum(worker.lent for worker in self._workers)
        wanted = replicas + min(straggling + min(alone, replicas), MAX_SPARES)
        healthy = [worker for worker in self._workers if worker.verdict is None]
        return wanted - len(healthy) - self._starting

    async def _try_to_add(self) -> None:
        try:
            await self._add()
        except (ConfigError, WorkerCrashError, OSError) as error:
            self._failed_starts.append(str(error))
        self._own -= {task for task in self._own if task.done()}
        await self._tell()

    async def _add(self) -> None:
        """One more worker, once it is ready."""
        try:
            process = await Process.start(self._target, self._payload, within_s=START_TIMEOUT_S)
        except ProcessEndedError as error:
            raise WorkerCrashError(str(error)) from None
        finally:
            self._starting -= 1
        if self._closed:
            await process.end()
            return
        self._failed_starts.clear()
        slots = self._settings.concurrency if process.is_async else 1
        self._is_shared = slots > 1
        self._workers.append(_Worker(process, {}, slots))

    def _end(self, worker: _Worker, verdict: WorkerError, cause: str) -> None:
        """End a worker with everything it started; its calls come to nothing."""
        if worker.verdict is None:
            worker.verdict = verdict
            worker.was_shared = len(worker.calls) > 1
            self.killed[cause] += 1
            self._retire(worker)

    def _retire(self, worker: _Worker) -> None:
        """A worker that is not to be used any more."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._keep(worker.process.end())

    async def _look_after(self) -> None:
        """Keep an eye on memory and on stragglers, without end."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self._check_stragglers(clock())
                await self._check_memory()
            except Exception:  # noqa: BLE001 - or nobody would look any more
                _log.exception("the workers of %s could not be looked at", self._name)

    def _check_stragglers(self, now: float) -> None:
        median = statistics.median(self._took) if self._took else 0.0
        limit_s = max(STRAGGLER_S, STRAGGLER_RATIO * median)
        for worker in [one for one in self._workers if one.calls]:
            if not worker.straggles and now - min(worker.calls.values()) > limit_s:
                worker.straggles = worker.slots == 1
                if worker.straggles:
                    worker.process.step_back()

    async def _check_memory(self) -> None:
        most = self._settings.memory_bytes
        for worker in list(self._workers):
            found = await asyncio.to_thread(self._table.memory_of_tree, worker.process.pid)
            if found > most:
                text = f"its process took {found >> 20} MB, of {most >> 20} it may"
                self._end(worker, WorkerMemoryError(text), "memory")

    def _keep(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Have work done whether or not somebody waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled():
            # Looked at: if nobody waited for it, its error is nobody's.
            task.exception()

    async def close(self) -> None:
        """End all workers; calls under way come to nothing."""
        self._closed = True
        for task in self._own:
            task.cancel()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.verdict = WorkerCrashError(f"the workers of {self._name} are closed")
        await asyncio.gather(*(worker.process.end() for worker in workers))
        while self._background:
            await asyncio.wait(set(self._background))
