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
from streamrl.process_pool.process import ProcessExitedError, WorkerProcess

T = TypeVar("T")
_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Deadline of a worker's start, s: it imports a user's file, and that may import torch."""
MAX_FAILED_STARTS = 3
"""So many workers in a row may fail to start before calls are told so."""
MONITOR_INTERVAL_S = 0.5
"""How often memory and stragglers are looked at, s."""
STRAGGLER_MIN_S, STRAGGLER_RATIO = 1.0, 5.0
"""A call takes far longer than others from so many seconds, and so many times their median."""
MAX_SPARE_WORKERS = 8
"""Most workers that stand in for stragglers."""
CANCEL_TIMEOUT_S = 1.0
"""An async call has this long to end once it is cancelled, s; then its worker is killed."""


class WorkerError(Exception):
    """A call came to nothing; the text is what its handler raised."""


class _SharedWorkerExitError(Exception):
    """Its worker ended while it had other calls too."""


class WorkerTimeoutError(WorkerError):
    """It took longer than it may; nothing of it runs any more."""


class WorkerCrashError(WorkerError):
    """Its process ended."""


class WorkerMemoryError(WorkerError):
    """Its process took more memory than it may, and was killed."""


@dataclass(frozen=True)
class WorkerPoolSettings:
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
class _WorkerState:
    """A process and what it is at: the start of each call, s of the loop's clock.

    `is_exclusive`: one call has it to itself. `was_shared`: it had several calls when it was ended.
    """

    process: WorkerProcess
    call_start_times: dict[int, float]
    slots: int
    is_straggler: bool = False
    is_exclusive: bool = False
    was_shared: bool = False
    exit_error: WorkerError | None = None

    @property
    def has_capacity(self) -> bool:
        is_open = not self.is_straggler and not self.is_exclusive and self.exit_error is None
        return is_open and len(self.call_start_times) < self.slots


class WorkerPool:
    """Workers that all hold what `target`, "module:function", makes of `payload`.

    `name` is what messages call it. `killed` counts the workers ended, by cause.
    """

    def __init__(self, name: str, target: str, payload: Any, settings: WorkerPoolSettings) -> None:
        self._name = name
        self._target = target
        self._payload = payload
        self._settings = settings
        self._workers: list[_WorkerState] = []
        self._num_starting = 0
        self._failed_starts: list[str] = []
        self._workers_changed = asyncio.Condition()
        self._shared_claim_lock, self._exclusive_claim_lock = asyncio.Lock(), asyncio.Lock()
        self._num_exclusive_waiters = 0
        self._has_concurrent_calls = False
        self._call_ids = itertools.count()
        self._recent_durations: deque[float] = deque(maxlen=100)
        self._background_tasks: set[asyncio.Task[Any]] = set()
        self._service_tasks: set[asyncio.Task[None]] = set()
        self._process_table = ProcessTable()
        self._is_closed = False
        self.kill_counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start one worker and what looks after all. Raises ConfigError as the target's load does.

        Raises WorkerCrashError if it ends before it is ready, or is not within START_TIMEOUT_S.
        """
        self._num_starting += 1
        await self._add_worker()
        self._service_tasks.add(self._spawn_task(self._monitor_workers()))

    async def call(self, request: Any, *, alone: bool = False) -> Any:
        """What the handler answers. Raises WorkerError, or one of its kinds, if it does not.

        `alone` gives it a worker to itself: a call that has failed may do so again. A call whose
        caller is cancelled goes on to its answer or its deadline: its worker is neither free before
        that, nor to blame.
        """
        try:
            return await self._run_call(request, alone=alone and self._has_concurrent_calls)
        except _SharedWorkerExitError:
            return await self._run_call(request, alone=True)

    async def _run_call(self, request: Any, *, alone: bool) -> Any:
        self._num_exclusive_waiters += alone
        try:
            worker, number = await self._claim_worker(alone=alone)
        finally:
            self._num_exclusive_waiters -= alone
        return await asyncio.shield(self._spawn_task(self._await_response(worker, number, request)))

    async def _await_response(self, worker: _WorkerState, number: int, request: Any) -> Any:
        began, clock = worker.call_start_times[number], asyncio.get_running_loop().time
        timeout_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ok, answer = await worker.process.send_request(number, request)
        except TimeoutError:
            if not await self._cancel_call(worker, number) and worker.was_shared:
                raise _SharedWorkerExitError from None
            raise WorkerTimeoutError(f"no result in {timeout_s:g} s") from None
        except ProcessExitedError:
            self._kill_worker(worker, WorkerCrashError(worker.process.exit_reason), "crash")
            assert worker.exit_error is not None
            if worker.was_shared:
                raise _SharedWorkerExitError from None
            raise type(worker.exit_error)(str(worker.exit_error)) from None
        finally:
            del worker.call_start_times[number]
            was_lent, worker.is_exclusive = worker.is_exclusive, False
            # Of one that straggled the priority cannot be given back to it.
            if not worker.call_start_times and (
                worker.is_straggler or (was_lent and self._num_missing < 0)
            ):
                self._retire_worker(worker)
            await self._notify_waiters()
        self._recent_durations.append(clock() - began)
        if not ok:
            raise WorkerError(answer)
        return answer

    async def _cancel_call(self, worker: _WorkerState, number: int) -> bool:
        """End one call: by itself where the handler is async and reacts, else with its worker.

        Whether it reacted: another call may hold up all of its worker, which is no fault of this.
        """
        if worker.slots > 1 and await worker.process.cancel_request(
            number, within_s=CANCEL_TIMEOUT_S
        ):
            self.kill_counts["timeout"] += 1
            return True
        self._kill_worker(worker, WorkerTimeoutError("a call could not be ended"), "timeout")
        return False

    def _find_free_workers(self, *, alone: bool) -> list[_WorkerState]:
        """Workers with room; an idle one is for those first who want it to themselves."""
        free = [worker for worker in self._workers if worker.has_capacity]
        if alone:
            return [worker for worker in free if not worker.call_start_times]
        return [
            worker
            for worker in free
            if worker.call_start_times or not self._exclusive_claim_lock.locked()
        ]

    async def _claim_worker(self, *, alone: bool) -> tuple[_WorkerState, int]:
        """A worker with room, and the number of a call begun in it: first come, first served."""
        async with self._exclusive_claim_lock if alone else self._shared_claim_lock:
            while not (free := self._find_free_workers(alone=alone)):
                if self._is_closed:
                    raise WorkerCrashError(f"the workers of {self._name} are closed")
                if len(self._failed_starts) >= MAX_FAILED_STARTS:
                    raise WorkerCrashError(
                        f"its worker does not start: {self._failed_starts.pop()}"
                    )
                self._start_missing_worker()
                async with self._workers_changed:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(MONITOR_INTERVAL_S):
                            await self._workers_changed.wait()
            worker, number = (
                min(free, key=lambda one: len(one.call_start_times)),
                next(self._call_ids),
            )
            worker.is_exclusive = alone
            worker.call_start_times[number] = asyncio.get_running_loop().time()
            return worker, number

    async def _notify_waiters(self) -> None:
        """Something has changed for who waits for a worker."""
        async with self._workers_changed:
            self._workers_changed.notify_all()

    def _start_missing_worker(self) -> None:
        """Start one more worker, if there are to be more."""
        if self._num_missing > 0:
            self._num_starting += 1
            self._service_tasks.add(self._spawn_task(self._try_add_worker()))

    @property
    def _num_missing(self) -> int:
        """Workers that there should be beside those there are."""
        replicas = self._settings.replicas
        straggling = sum(worker.is_straggler for worker in self._workers)
        alone = self._num_exclusive_waiters + sum(worker.is_exclusive for worker in self._workers)
        wanted = replicas + min(straggling + min(alone, replicas), MAX_SPARE_WORKERS)
        healthy = [worker for worker in self._workers if worker.exit_error is None]
        return wanted - len(healthy) - self._num_starting

    async def _try_add_worker(self) -> None:
        try:
            await self._add_worker()
        except (ConfigError, WorkerCrashError, OSError) as error:
            self._failed_starts.append(str(error))
        self._service_tasks -= {task for task in self._service_tasks if task.done()}
        await self._notify_waiters()

    async def _add_worker(self) -> None:
        """One more worker, once it is ready."""
        try:
            process = await WorkerProcess.start(
                self._target, self._payload, within_s=START_TIMEOUT_S
            )
        except ProcessExitedError as error:
            raise WorkerCrashError(str(error)) from None
        finally:
            self._num_starting -= 1
        if self._is_closed:
            await process.kill()
            return
        self._failed_starts.clear()
        slots = self._settings.concurrency if process.is_async else 1
        self._has_concurrent_calls = slots > 1
        self._workers.append(_WorkerState(process, {}, slots))

    def _kill_worker(self, worker: _WorkerState, verdict: WorkerError, cause: str) -> None:
        """End a worker with everything it started; its calls come to nothing."""
        if worker.exit_error is None:
            worker.exit_error = verdict
            worker.was_shared = len(worker.call_start_times) > 1
            self.kill_counts[cause] += 1
            self._retire_worker(worker)

    def _retire_worker(self, worker: _WorkerState) -> None:
        """A worker that is not to be used any more."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._spawn_task(worker.process.kill())

    async def _monitor_workers(self) -> None:
        """Keep an eye on memory and on stragglers, without end."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(MONITOR_INTERVAL_S)
            try:
                self._deprioritize_stragglers(clock())
                await self._kill_over_memory()
            except Exception:  # noqa: BLE001 - or nobody would look any more
                _log.exception("the workers of %s could not be looked at", self._name)

    def _deprioritize_stragglers(self, now: float) -> None:
        median = statistics.median(self._recent_durations) if self._recent_durations else 0.0
        limit_s = max(STRAGGLER_MIN_S, STRAGGLER_RATIO * median)
        for worker in [one for one in self._workers if one.call_start_times]:
            if not worker.is_straggler and now - min(worker.call_start_times.values()) > limit_s:
                worker.is_straggler = worker.slots == 1
                if worker.is_straggler:
                    worker.process.lower_priority()

    async def _kill_over_memory(self) -> None:
        most = self._settings.memory_bytes
        for worker in list(self._workers):
            found = await asyncio.to_thread(
                self._process_table.measure_tree_memory, worker.process.pid
            )
            if found > most:
                text = f"its process took {found >> 20} MB, of {most >> 20} it may"
                self._kill_worker(worker, WorkerMemoryError(text), "memory")

    def _spawn_task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Have work done whether or not somebody waits for it."""
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[Any]") -> None:
        self._background_tasks.discard(task)
        if not task.cancelled():
            # Looked at: if nobody waited for it, its error is nobody's.
            task.exception()

    async def close(self) -> None:
        """End all workers; calls under way come to nothing."""
        self._is_closed = True
        for task in self._service_tasks:
            task.cancel()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.exit_error = WorkerCrashError(f"the workers of {self._name} are closed")
        await asyncio.gather(*(worker.process.kill() for worker in workers))
        while self._background_tasks:
            await asyncio.wait(set(self._background_tasks))
