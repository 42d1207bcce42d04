"""Pool of worker processes; kills and replaces workers that hang, crash or use too much memory.

Deadlines: a call's timeout starts when a worker begins the call, not when the call is queued.

Stragglers: a call that takes far longer than the median of recent calls keeps its worker, which
continues at the lowest priority. While calls wait, a spare worker replaces the straggling worker.

Blame: if a worker that runs several calls exits, the faulty call is unknown. The pool repeats each
of these calls on an exclusive worker, and a call fails only if that worker exits too.
"""

import asyncio
import contextlib
import itertools
import logging
import statistics
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from streamrl.errors import ConfigError
from streamrl.user_code.pool.background_tasks import BackgroundTasks
from streamrl.user_code.pool.proc_stats import ProcessTable
from streamrl.user_code.pool.process import ProcessExitedError, WorkerProcess

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Long because a worker imports the user's file, which may import torch."""
MAX_FAILED_STARTS = 3
"""Consecutive failures after which waiting calls raise WorkerCrashError."""
MONITOR_INTERVAL_S = 0.5
STRAGGLER_MIN_S, STRAGGLER_RATIO = 1.0, 5.0
"""A call straggles beyond both: this duration, and this multiple of the median duration."""
MAX_SPARE_WORKERS = 8
CANCEL_TIMEOUT_S = 1.0
"""Grace period of a cancelled async call; afterwards the pool kills the worker."""


class WorkerError(Exception):
    """Failure of a call to a worker.

    The base class itself means that the handler raised an exception; the message is its text.
    """


class _SharedWorkerExitError(Exception):
    """The worker exited while running several calls; the faulty call is unknown."""


class WorkerTimeoutError(WorkerError):
    """The call exceeded its deadline and was stopped."""


class WorkerCrashError(WorkerError):
    """The worker process exited, did not start, or was killed because the pool closed."""


class WorkerMemoryError(WorkerError):
    """The worker process exceeded the memory limit and was killed."""


@dataclass(frozen=True)
class WorkerPoolSettings:
    """Size and limits of a pool of worker processes.

    replicas: worker processes.
    concurrency: concurrent calls per worker with an async handler; a worker with a sync handler
        runs a single call at a time.
    timeout_s: deadline of a call.
    memory_bytes: limit of a worker including child processes.
    """

    replicas: int
    concurrency: int
    timeout_s: float
    memory_bytes: int


@dataclass
class _WorkerState:
    """A worker process and its running calls.

    call_start_times: start of each call by call id, s of the event loop's clock.
    slots: calls that the worker may run concurrently.
    is_straggler: its call takes far longer than the median; the worker gets no further calls.
    is_exclusive: reserved for a single call.
    was_shared: several calls were running when the worker was killed.
    exit_error: the reason why the pool killed the worker, raised by its calls.
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
    """Pool of identical worker processes that call the same handler.

    name: used in error messages.
    target: "module:function"; the worker calls this function with `payload` to get the handler.
    kill_counts: number of killed workers by cause.
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
        self._background_tasks = BackgroundTasks()
        self._service_tasks: set[asyncio.Task[None]] = set()
        self._process_table = ProcessTable()
        self._is_closed = False
        self.kill_counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start the first worker, and the monitor that looks for stragglers and excessive memory.

        Raises ConfigError if loading the handler does, and WorkerCrashError if the worker exits
        early or is not ready within START_TIMEOUT_S.
        """
        self._num_starting += 1
        await self._add_worker()
        self._service_tasks.add(self._background_tasks.spawn(self._monitor_workers()))

    async def call(self, request: Any, *, exclusive: bool = False) -> Any:
        """Run a request in a worker and return the handler's result. Raises WorkerError.

        exclusive: run on an exclusive worker, for a call that failed before. If the caller is
            cancelled, the call still runs to its result or deadline and occupies its worker until
            then.
        """
        try:
            return await self._run_call(request, exclusive=exclusive and self._has_concurrent_calls)
        except _SharedWorkerExitError:
            return await self._run_call(request, exclusive=True)

    async def _run_call(self, request: Any, *, exclusive: bool) -> Any:
        """Run a request in the next free worker, to its end even if the caller is cancelled."""
        self._num_exclusive_waiters += exclusive
        try:
            worker, call_id = await self._claim_worker(exclusive=exclusive)
        finally:
            self._num_exclusive_waiters -= exclusive
        return await asyncio.shield(
            self._background_tasks.spawn(self._await_response(worker, call_id, request))
        )

    async def _await_response(self, worker: _WorkerState, call_id: int, request: Any) -> Any:
        """Send a request to a claimed worker, enforce the deadline, and free the worker afterwards.

        Raises _SharedWorkerExitError if the worker exited with other calls running, else
        WorkerError.
        """
        started, clock = worker.call_start_times[call_id], asyncio.get_running_loop().time
        timeout_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ok, answer = await worker.process.send_request(call_id, request)
        except TimeoutError:
            if not await self._cancel_call(worker, call_id) and worker.was_shared:
                raise _SharedWorkerExitError from None
            raise WorkerTimeoutError(f"no result in {timeout_s:g} s") from None
        except ProcessExitedError:
            self._kill_worker(worker, WorkerCrashError(worker.process.exit_reason), "crash")
            assert worker.exit_error is not None
            if worker.was_shared:
                raise _SharedWorkerExitError from None
            raise type(worker.exit_error)(str(worker.exit_error)) from None
        finally:
            del worker.call_start_times[call_id]
            was_exclusive, worker.is_exclusive = worker.is_exclusive, False
            # Only root may raise a process's priority again, so a straggler is not reused.
            if not worker.call_start_times and (
                worker.is_straggler or (was_exclusive and self._num_missing < 0)
            ):
                self._retire_worker(worker)
            await self._notify_waiters()
        self._recent_durations.append(clock() - started)
        if not ok:
            raise WorkerError(answer)
        return answer

    async def _cancel_call(self, worker: _WorkerState, call_id: int) -> bool:
        """Cancel a call past its deadline; return False if the pool killed the worker instead.

        Only an async handler can be cancelled. A handler that blocks the event loop in another call
        does not react in time, so killing the worker does not prove this call faulty.
        """
        if worker.slots > 1 and await worker.process.cancel_request(
            call_id, within_s=CANCEL_TIMEOUT_S
        ):
            self.kill_counts["timeout"] += 1
            return True
        self._kill_worker(worker, WorkerTimeoutError("a call could not be cancelled"), "timeout")
        return False

    def _find_free_workers(self, *, exclusive: bool) -> list[_WorkerState]:
        """Return workers that can take a call now.

        exclusive: workers without other calls only. While such a call waits, idle workers are
            kept for it.
        """
        free = [worker for worker in self._workers if worker.has_capacity]
        if exclusive:
            return [worker for worker in free if not worker.call_start_times]
        return [
            worker
            for worker in free
            if worker.call_start_times or not self._exclusive_claim_lock.locked()
        ]

    async def _claim_worker(self, *, exclusive: bool) -> tuple[_WorkerState, int]:
        """Wait for a free worker (FIFO); return it and a call id. Raises WorkerCrashError."""
        async with self._exclusive_claim_lock if exclusive else self._shared_claim_lock:
            while not (free := self._find_free_workers(exclusive=exclusive)):
                if self._is_closed:
                    raise WorkerCrashError(f"the workers of {self._name} are closed")
                if len(self._failed_starts) >= MAX_FAILED_STARTS:
                    raise WorkerCrashError(f"worker does not start: {self._failed_starts.pop()}")
                self._start_missing_worker()
                async with self._workers_changed:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(MONITOR_INTERVAL_S):
                            await self._workers_changed.wait()
            worker, call_id = (
                min(free, key=lambda worker: len(worker.call_start_times)),
                next(self._call_ids),
            )
            worker.is_exclusive = exclusive
            worker.call_start_times[call_id] = asyncio.get_running_loop().time()
            return worker, call_id

    async def _notify_waiters(self) -> None:
        async with self._workers_changed:
            self._workers_changed.notify_all()

    def _start_missing_worker(self) -> None:
        if self._num_missing > 0:
            self._num_starting += 1
            self._service_tasks.add(self._background_tasks.spawn(self._try_add_worker()))

    @property
    def _num_missing(self) -> int:
        """Number of workers to start; negative if the pool has more than needed.

        A pool needs `replicas` workers plus a spare per straggler and per exclusive call. Exclusive
        calls count at most `replicas` spares; the sum of spares is at most MAX_SPARE_WORKERS.
        """
        replicas = self._settings.replicas
        straggling = sum(worker.is_straggler for worker in self._workers)
        num_exclusive = self._num_exclusive_waiters + sum(
            worker.is_exclusive for worker in self._workers
        )
        target = replicas + min(straggling + min(num_exclusive, replicas), MAX_SPARE_WORKERS)
        healthy = [worker for worker in self._workers if worker.exit_error is None]
        return target - len(healthy) - self._num_starting

    async def _try_add_worker(self) -> None:
        """Add a worker in the background; record a failure for the calls that wait for a worker."""
        try:
            await self._add_worker()
        except (ConfigError, WorkerCrashError, OSError) as error:
            self._failed_starts.append(str(error))
        self._service_tasks -= {task for task in self._service_tasks if task.done()}
        await self._notify_waiters()

    async def _add_worker(self) -> None:
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

    def _kill_worker(self, worker: _WorkerState, error: WorkerError, cause: str) -> None:
        """Kill a worker, unless killed before; its running calls then raise `error`."""
        if worker.exit_error is None:
            worker.exit_error = error
            worker.was_shared = len(worker.call_start_times) > 1
            self.kill_counts[cause] += 1
            self._retire_worker(worker)

    def _retire_worker(self, worker: _WorkerState) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            self._background_tasks.spawn(worker.process.kill())

    async def _monitor_workers(self) -> None:
        """Look for stragglers and excessive memory every MONITOR_INTERVAL_S, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(MONITOR_INTERVAL_S)
            try:
                self._deprioritize_stragglers(clock())
                await self._kill_over_memory()
            except Exception:  # noqa: BLE001 - otherwise the monitor would stop for good
                _log.exception("monitoring the workers of %s failed", self._name)

    def _deprioritize_stragglers(self, now: float) -> None:
        """Mark sync workers with an overdue call as stragglers; lower their priority."""
        median = statistics.median(self._recent_durations) if self._recent_durations else 0.0
        limit_s = max(STRAGGLER_MIN_S, STRAGGLER_RATIO * median)
        for worker in [worker for worker in self._workers if worker.call_start_times]:
            if not worker.is_straggler and now - min(worker.call_start_times.values()) > limit_s:
                worker.is_straggler = worker.slots == 1
                if worker.is_straggler:
                    worker.process.lower_priority()

    async def _kill_over_memory(self) -> None:
        for worker in list(self._workers):
            excess = await asyncio.to_thread(
                self._process_table.describe_excess,
                worker.process.pid,
                self._settings.memory_bytes,
            )
            if excess:
                self._kill_worker(worker, WorkerMemoryError(excess), "memory")

    async def close(self) -> None:
        """Kill all workers; running calls raise WorkerCrashError."""
        self._is_closed = True
        for task in self._service_tasks:
            task.cancel()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.exit_error = WorkerCrashError(f"the workers of {self._name} are closed")
        await asyncio.gather(*(worker.process.kill() for worker in workers))
        await self._background_tasks.drain()


IDLE_TIMEOUT_S = 30.0
"""Time without a call after which the process ends; the next call starts another."""


class BlockingWorker:
    """A worker process that starts with the first call and runs one call at a time.

    target: "module:function"; the worker calls this function with `payload` to get its handler.
    timeout_s: deadline of a call. The process dies with this one. Calls may come from any thread:
    an event loop in a thread of its own holds the process.
    """

    def __init__(self, target: str, payload: Any, *, timeout_s: float) -> None:
        self._target = target
        self._payload = payload
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: WorkerProcess | None = None
        self._call_ids = itertools.count()
        self._idle: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks()

    def call(self, request: Any) -> Any:
        """Run a request in the worker and return the handler's result.

        Raises ConfigError if loading the handler does, and WorkerError: if the handler raised, the
        process exited, or the deadline passed, which ends the process.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(self._call(request), self._loop).result()

    async def _call(self, request: Any) -> Any:
        if self._idle is not None:
            self._idle.cancel()
        try:
            if self._process is None:
                self._process = await WorkerProcess.start(
                    self._target, self._payload, within_s=START_TIMEOUT_S
                )
            async with asyncio.timeout(self._timeout_s):
                ok, answer = await self._process.send_request(next(self._call_ids), request)
        except TimeoutError:
            await self._end()
            raise WorkerTimeoutError(f"no result in {self._timeout_s:g} s") from None
        except ProcessExitedError as error:
            await self._end()
            raise WorkerCrashError(str(error)) from None
        self._idle = asyncio.get_running_loop().call_later(
            IDLE_TIMEOUT_S, lambda: self._tasks.spawn(self._end())
        )
        if not ok:
            raise WorkerError(answer)
        return answer

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()
