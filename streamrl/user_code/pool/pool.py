"""Pools of processes for other people's code that many callers share, and of the sandbox's jails.

    claim ---> process ---> release        a claim is a call, an episode, or a program in a jail

Life cycle, the same for reward functions, environments, and jails of programs that are scored:

Start: `replicas` processes that take claims are kept ready. Starts that fail again and again fail
the claims that wait.

Deadline: that of a call begins with the call, not with the wait for a process. A call of an async
handler is cancelled at its deadline. Any other process is killed, with all that it has started. The
deadlines of a jail are the sandbox's (`Jail.request_report`): a program has several.

Memory: the pool measures a process and all that it has started, and kills it above the limit; the
sandbox measures its jails itself, more often and only while a program runs.

Spares: a process takes no further claims while a call in it takes far longer than the median (the
process continues at the lowest priority), or was given up and does not return. A spare stands in.

Blame: if a process that runs several calls ends, the faulty call is unknown. `WorkerPool.call`
repeats each of them on an exclusive process, and a call fails only if that one ends, too.

Outside of a pool run the jails of the tool `python` and the servers of MCP tools: an episode in a
host process starts them when it needs them, waits for their end when it closes, and shares them
with none. The memory of the host counts theirs, and the end of the host is theirs.
docs/architecture.md, "Other people's code", lists what runs in no process of its own.
"""

import asyncio
import itertools
import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from streamrl.user_code.pool.background_tasks import BackgroundTasks
from streamrl.user_code.pool.proc_stats import ProcessTable
from streamrl.user_code.pool.process import ProcessExitedError, WorkerProcess

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Long because a worker imports the user's file, which may import torch."""
MAX_FAILED_STARTS = 3
"""Consecutive failures after which waiting claims raise WorkerCrashError."""
MONITOR_INTERVAL_S = 0.5
STRAGGLER_MIN_S, STRAGGLER_RATIO = 1.0, 5.0
"""A call straggles beyond both: this duration, and this multiple of the median duration."""
MAX_SPARES = 8
MAX_HANGING_CALLS = 8
CANCEL_TIMEOUT_S = 1.0
"""Grace period of a cancelled async call; afterwards the pool kills the worker."""


class WorkerError(Exception):
    """Failure of a call to a worker.

    The base class itself means that the handler raised an exception; the message is its text.
    """


class WorkerTimeoutError(WorkerError):
    """The call exceeded its deadline and was stopped."""


class WorkerCrashError(WorkerError):
    """The worker process exited, did not start, or was killed because of others or of the pool."""


class WorkerMemoryError(WorkerError):
    """The worker process exceeded the memory limit and was killed."""


class SharedWorkerError(WorkerCrashError):
    """The worker ended while it ran several calls; the faulty call is unknown."""


class SharedTimeoutError(SharedWorkerError):
    """The worker did not react to the deadline of a call, one of several in it."""


class PoolProcess(Protocol):
    """Process of a pool: a WorkerProcess or a Jail.

    is_async: it may have several claims. pid: root of the process tree.
    """

    is_async: bool

    @property
    def pid(self) -> int: ...

    @property
    def has_exited(self) -> bool: ...

    @property
    def exit_reason(self) -> str: ...

    async def kill(self) -> None: ...


ProcessT = TypeVar("ProcessT", bound=PoolProcess)


@dataclass(frozen=True)
class PoolSettings:
    """Size and limits of a pool.

    replicas: processes that take claims.
    concurrency: claims of a process with an async handler; others have one.
    timeout_s: deadline of a call.
    memory_bytes: limit of a process including its children.
    is_isolated: a process serves a single claim and ends with it.
    max_spares: processes beyond `replicas`. At the limit, processes with hanging calls take claims.
    """

    replicas: int
    concurrency: float = math.inf
    timeout_s: float = math.inf
    memory_bytes: float = math.inf
    is_isolated: bool = False
    max_spares: float = MAX_SPARES


@dataclass(eq=False)
class PooledProcess(Generic[ProcessT]):
    """A process of a pool and its claims.

    slots: claims that it may have at a time. num_claims: those that it has.
    call_starts: start of each running call, s of the event loop's clock.
    num_hanging: calls that run although they were given up, as the handler last reported.
    is_straggler: its call takes far longer than the median. is_exclusive: it has its only claim.
    was_shared: several calls were running when it ended.
    kill_error: reason for which the pool killed it, if it did not end by itself.
    """

    process: ProcessT
    slots: float
    num_claims: int = 0
    call_starts: dict[int, float] = field(default_factory=dict)
    num_hanging: int = 0
    is_straggler: bool = False
    is_exclusive: bool = False
    was_used: bool = False
    was_shared: bool = False
    kill_error: WorkerError | None = None

    @property
    def has_ended(self) -> bool:
        """True also if it is about to be killed."""
        return self.kill_error is not None or self.process.has_exited

    @property
    def is_held_up(self) -> bool:
        return self.is_straggler or self.num_hanging > 0

    def make_error(self) -> WorkerError:
        """Return the error of a call in a process that has ended."""
        error = self.kill_error or WorkerCrashError(self.process.exit_reason)
        return type(error)(str(error))


class ProcessPool(Generic[ProcessT]):
    """Pool of identical processes.

    name: used in error messages. start_process: starts one; raises ProcessExitedError.
    processes: all that take claims or have some. kill_counts: number of processes that were killed
    or ended, by cause: crash, memory, timeout, hanging.
    """

    def __init__(
        self, name: str, start_process: Callable[[], Awaitable[ProcessT]], settings: PoolSettings
    ) -> None:
        self._name = name
        self._start_process = start_process
        self._settings = settings
        self._num_starting = 0
        self._num_failed_starts, self._num_given_up, self._start_error = 0, 0, ""
        self._has_slots = False
        self._changed = asyncio.Event()
        # First come, first served.
        self._claiming, self._claiming_exclusively = asyncio.Lock(), asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._service_tasks: set[asyncio.Task[None]] = set()
        self._process_table = ProcessTable()
        self._is_closed = False
        self.processes: list[PooledProcess[ProcessT]] = []
        self.kill_counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start the first process, then the others and the monitor in the background.

        Raises ConfigError if loading the handler does, and WorkerCrashError if the process exits
        early or is not ready within START_TIMEOUT_S.
        """
        self._num_starting += 1
        try:
            await self._add_process()
        except (ProcessExitedError, OSError) as error:
            raise self._make_start_error(str(error)) from None
        self._service_tasks.add(self._tasks.spawn(self._monitor()))
        self._start_missing()

    def _make_start_error(self, reason: str) -> WorkerCrashError:
        return WorkerCrashError(f"worker does not start: {reason}")

    async def claim(self, *, exclusive: bool = False) -> PooledProcess[ProcessT]:
        """Wait for a process with room; return the one with the fewest claims.

        exclusive: a process without other claims, which gets none until this one is released.
        Raises WorkerCrashError if processes do not start, or the pool is closed.
        """
        exclusive = exclusive and self._has_slots
        async with self._claiming_exclusively if exclusive else self._claiming:
            num_given_up = self._num_given_up
            while not (free := self._find_free(exclusive=exclusive)):
                if self._is_closed:
                    raise WorkerCrashError(f"the processes of {self._name} are closed")
                if self._num_given_up > num_given_up:
                    raise self._make_start_error(self._start_error)
                if self._num_failed_starts >= MAX_FAILED_STARTS:
                    # The reason may be gone since then: try again for this claim.
                    self._num_failed_starts = 0
                self._start_missing()
                await self._changed.wait()
            claimed = min(free, key=lambda process: (process.num_hanging, process.num_claims))
            claimed.num_claims += 1
            claimed.was_used, claimed.is_exclusive = True, exclusive
        self._start_missing()
        if exclusive:
            self._notify_waiters()
        return claimed

    def release(self, process: PooledProcess[ProcessT]) -> None:
        process.num_claims -= 1
        process.is_exclusive = False
        self.check(process)

    def check(self, process: PooledProcess[ProcessT]) -> None:
        """Kill a process if its state demands it, and start those that are missing."""
        if process in self.processes:
            is_idle = not process.num_claims
            if process.process.has_exited:
                # Without a reason: the exit status, which may follow later, is the reason.
                self._kill(process, "crash")
            elif process.num_hanging > (0 if is_idle else MAX_HANGING_CALLS):
                reason = f"{process.num_hanging} calls hang in it"
                self._kill(process, "hanging", WorkerCrashError(reason))
            elif is_idle and self._is_done(process):
                self._remove(process)
        self._start_missing()
        self._notify_waiters()

    def _is_done(self, idle: PooledProcess[ProcessT]) -> bool:
        if self._settings.is_isolated:
            return idle.was_used
        # Only root may raise a process's priority again, so a straggler is not reused.
        return idle.is_straggler or self._num_missing < 0

    def _takes_claims(self, process: PooledProcess[ProcessT]) -> bool:
        is_taken = process.is_exclusive or (self._settings.is_isolated and process.was_used)
        return not (is_taken or process.is_held_up or process.has_ended)

    def _find_free(self, *, exclusive: bool) -> list[PooledProcess[ProcessT]]:
        """Return processes that can take a claim now.

        While an exclusive claim waits, idle processes are kept for it.
        """
        free = [process for process in self.processes if self._takes_claims(process)]
        if not free and self._num_startable <= 0:
            free = [p for p in self.processes if not (p.is_exclusive or p.has_ended)]
        if exclusive:
            return [process for process in free if not process.num_claims]
        is_kept = self._claiming_exclusively.locked()
        return [p for p in free if p.num_claims < p.slots and (p.num_claims or not is_kept)]

    @property
    def _num_missing(self) -> int:
        """Number of processes to start; negative if more than needed take claims."""
        num_needed = self._settings.replicas + self._claiming_exclusively.locked()
        return num_needed - sum(map(self._takes_claims, self.processes)) - self._num_starting

    @property
    def _num_startable(self) -> float:
        """Number of processes below the limit of all; those that are starting do not count."""
        return self._settings.replicas + self._settings.max_spares - len(self.processes)

    def _start_missing(self) -> None:
        if self._is_closed or self._num_failed_starts >= MAX_FAILED_STARTS:
            return
        num_missing = min(self._num_missing, self._num_startable - self._num_starting)
        for _ in range(int(num_missing)):
            self._num_starting += 1
            self._service_tasks.add(self._tasks.spawn(self._try_add_process()))

    async def _try_add_process(self) -> None:
        """Add a process in the background; record a failure for the claims that wait for one."""
        try:
            await self._add_process()
        except Exception as error:  # noqa: BLE001 - claims would wait for ever
            self._start_error = str(error)
            self._num_failed_starts += 1
            self._num_given_up += self._num_failed_starts == MAX_FAILED_STARTS
        self._service_tasks -= {task for task in self._service_tasks if task.done()}
        self._start_missing()
        self._notify_waiters()

    async def _add_process(self) -> None:
        try:
            process = await self._start_process()
        finally:
            self._num_starting -= 1
        if self._is_closed:
            await process.kill()
            return
        self._num_failed_starts = 0
        slots = self._settings.concurrency if process.is_async else 1
        self._has_slots = slots > 1
        self.processes.append(PooledProcess(process, slots))

    def _kill(
        self, process: PooledProcess[ProcessT], cause: str, error: WorkerError | None = None
    ) -> None:
        """Kill a process, unless it was killed before; its running calls then raise `error`."""
        if process in self.processes:
            self.kill_counts[cause] += 1
            process.was_shared = len(process.call_starts) > 1
            process.kill_error = error
            self._remove(process)

    def _remove(self, process: PooledProcess[ProcessT]) -> None:
        self.processes.remove(process)
        self._tasks.spawn(self._end(process.process))
        self._start_missing()

    async def _end(self, process: ProcessT) -> None:
        try:
            await process.kill()
        except Exception:  # noqa: BLE001 - nobody waits for it
            _log.exception("ending a process of %s failed", self._name)

    def _notify_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _monitor(self) -> None:
        """Look for exited and too large processes every MONITOR_INTERVAL_S, until cancelled."""
        while True:
            await asyncio.sleep(MONITOR_INTERVAL_S)
            for process in list(self.processes):
                try:
                    await self._check_limits(process)
                except Exception:  # noqa: BLE001 - otherwise the monitor would stop for good
                    _log.exception("monitoring the processes of %s failed", self._name)

    async def _check_limits(self, process: PooledProcess[ProcessT]) -> None:
        limit = self._settings.memory_bytes
        if limit < math.inf:
            measure, pid = self._process_table.measure_tree_memory, process.process.pid
            if (used := await asyncio.to_thread(measure, pid)) > limit:
                sizes = f"used {used >> 20} MiB, the limit is {int(limit) >> 20} MiB"
                self._kill(process, "memory", WorkerMemoryError(f"worker process {sizes}"))
        self.check(process)

    async def close(self) -> None:
        """Kill all processes; running calls and waiting claims raise WorkerCrashError."""
        self._is_closed = True
        for task in self._service_tasks:
            task.cancel()
        for process in list(self.processes):
            process.kill_error = WorkerCrashError(f"the processes of {self._name} are closed")
            self._remove(process)
        self._notify_waiters()
        await self._tasks.drain()


Worker = PooledProcess[WorkerProcess]


class WorkerPool(ProcessPool[WorkerProcess]):
    """Pool of identical worker processes that call the same handler.

    target: "module:function"; a worker calls this function with `payload` to get the handler.
    """

    def __init__(self, name: str, target: str, payload: Any, settings: PoolSettings) -> None:
        start = partial(WorkerProcess.start, target, payload, START_TIMEOUT_S)
        super().__init__(name, start, settings)
        self._call_ids = itertools.count()
        self._recent_durations: deque[float] = deque(maxlen=100)

    async def call(self, request: Any, *, exclusive: bool = False) -> Any:
        """Run a request in a worker and return the handler's result. Raises WorkerError.

        exclusive: run on an exclusive worker, for a call that failed before. If the caller is
            cancelled, the call still runs to its result or deadline and occupies its worker until
            then.
        """
        try:
            return await self._call_once(request, exclusive=exclusive)
        except SharedWorkerError:
            return await self._call_once(request, exclusive=True)

    async def _call_once(self, request: Any, *, exclusive: bool) -> Any:
        worker = await self.claim(exclusive=exclusive)
        return await asyncio.shield(self._tasks.spawn(self._call_and_release(worker, request)))

    async def _call_and_release(self, worker: Worker, request: Any) -> Any:
        try:
            return await self.request(worker, request, self._settings.timeout_s)
        finally:
            self.release(worker)

    async def request(self, worker: Worker, request: Any, timeout_s: float) -> Any:
        """Run a request in a claimed worker and return the handler's result.

        Raises SharedWorkerError if the worker ended with other calls running, else WorkerError.
        """
        call_id, clock = next(self._call_ids), asyncio.get_running_loop().time
        worker.call_starts[call_id] = started = clock()
        try:
            async with asyncio.timeout(timeout_s):
                ok, answer = await worker.process.send_request(call_id, request)
        except TimeoutError:
            if await self._cancel_request(worker, call_id):
                self.kill_counts["timeout"] += 1
            elif worker.was_shared:
                raise SharedTimeoutError("a call in it did not react to its deadline") from None
            raise WorkerTimeoutError(f"no result in {timeout_s:g} s") from None
        except ProcessExitedError:
            self._kill(worker, "crash")
            error = worker.make_error()
            raise (SharedWorkerError(str(error)) if worker.was_shared else error) from None
        finally:
            del worker.call_starts[call_id]
        self._recent_durations.append(clock() - started)
        if not ok:
            raise WorkerError(answer)
        return answer

    async def _cancel_request(self, worker: Worker, call_id: int) -> bool:
        """Cancel a call past its deadline; return False if the pool killed the worker instead.

        Only an async handler can be cancelled. A handler that blocks the event loop in another call
        does not react in time, so killing the worker does not prove this call faulty.
        """
        if worker.process.is_async and await worker.process.cancel_request(
            call_id, within_s=CANCEL_TIMEOUT_S
        ):
            return True
        self._kill(worker, "timeout", WorkerTimeoutError("a call did not react to its deadline"))
        return False

    async def _check_limits(self, process: Worker) -> None:
        await super()._check_limits(process)
        self._deprioritize_straggler(process)

    def _deprioritize_straggler(self, worker: Worker) -> None:
        """Mark a sync worker with an overdue call as a straggler; lower its priority."""
        if worker.process.is_async or worker.is_straggler or not worker.call_starts:
            return
        median = statistics.median(self._recent_durations) if self._recent_durations else 0.0
        duration = asyncio.get_running_loop().time() - min(worker.call_starts.values())
        if duration > max(STRAGGLER_MIN_S, STRAGGLER_RATIO * median):
            worker.is_straggler = True
            worker.process.lower_priority()
            self.check(worker)
