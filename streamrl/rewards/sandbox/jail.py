"""One jail: the process that holds one program, from its start to its certain end."""

import asyncio
import contextlib
import json
import marshal
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import DeadlineError
from streamrl.process_pool.proc_stats import ProcessTable
from streamrl.rewards.sandbox import driver
from streamrl.rewards.sandbox.isolation import (
    ENVIRONMENT,
    NO_ISOLATION,
    PRIVATE_DIR,
    IsolationMode,
    build_boot_command,
    build_jail_command,
)
from streamrl.rewards.sandbox.program import MIB, ProgramLimits

#: Deadlines, s: until a started jail says that it waits; what the driver may take beyond the
#: time of a test; until the processes of a killed jail are gone.
START_TIMEOUT_S = 20.0
GRACE_PERIOD_S = 3.0
KILL_TIMEOUT_S = 20.0
#: How often the memory of a running program is looked at, s, and for how many times longer than a
#: look took there is none: to look at very many mappings takes the kernel a while.
MEMORY_CHECK_INTERVAL_S = 0.05
_PAUSE_PER_CHECK_TIME = 2
#: What a mapping of a process counts as. It takes about 220 bytes in the kernel when nothing is in
#: it, and may take some 2 KiB where processes are children of children. It counts as more, so that
#: a program is over its limit before counting takes long.
_MAPPING_BYTES = 16 << 10
_AVAILABLE_CORES = tuple(sorted(os.sched_getaffinity(0)))


class JailError(Exception):
    """A jail could not be made; the message says why."""


class JailLostError(Exception):
    """A jail ended before it reported, and nobody here ended it."""


class MemoryLimitError(Exception):
    """The processes of a jail together held more memory than they may."""


@dataclass(frozen=True)
class JailReport:
    """How one run in a jail ended, as its driver says (see driver.py for `how` and `code`)."""

    exit_kind: int
    exit_code: int
    seconds: float
    cpu_s: float
    out: bytes
    err: bytes


@dataclass(frozen=True)
class JailSpec:
    """All that jails of one sandbox have in common. `filter` is that of seccomp.py."""

    isolation: IsolationMode
    limits: ProgramLimits
    syscall_filter: bytes
    driver_code: bytes
    process_table: ProcessTable


def make_jail_spec(
    isolation: IsolationMode, limits: ProgramLimits, syscall_filter: bytes
) -> JailSpec:
    """A blueprint, with the driver's code as it is sent into each jail."""
    source = Path(driver.__file__).read_text(encoding="utf-8")
    code = marshal.dumps(compile(source, "driver", "exec", dont_inherit=True, optimize=2))
    return JailSpec(
        isolation, limits, syscall_filter, code, ProcessTable(mapping_bytes=_MAPPING_BYTES)
    )


class Jail:
    """A started jail. Not for sharing: one program is sent to it, then it is ended."""

    def __init__(self, plan: JailSpec, folder: str, process: "subprocess.Popen[bytes]") -> None:
        self._spec = plan
        self._folder = folder
        self._process = process
        self._exit_fd = os.pidfd_open(process.pid)
        self._init_process: tuple[int, int] | None = None  # pid and pidfd of the jail's process 1
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, plan: JailSpec, number: int) -> "Jail":
        """A jail that waits for its program. Raises JailError.

        It dies with the thread that calls this, so call it from one that stays.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            said, says = os.pipe()
            try:
                jail = cls(plan, *_spawn_jail(plan, number, theirs, says))
            except OSError as error:
                writer.close()
                os.close(said)
                raise JailError(f"no process for a jail: {error}") from error
            finally:
                os.close(says)
        jail._reader, jail._writer = reader, writer
        try:
            await jail._boot_driver(said)
        except BaseException:
            await jail.kill()
            raise
        finally:
            os.close(said)
        return jail

    async def _boot_driver(self, said: int) -> None:
        self._writer.write(self._spec.driver_code)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._read_report()
            pid = (
                self._process.pid if self._spec.isolation is NO_ISOLATION else _read_child_pid(said)
            )
            self._init_process = (pid, os.pidfd_open(pid))
        except (JailLostError, ProcessLookupError, ValueError) as error:
            raise JailError(self._read_last_error()) from error
        except TimeoutError as error:
            raise JailError(f"a jail was not ready after {START_TIMEOUT_S:.0f} s") from error

    def _read_last_error(self) -> str:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        words = self._process.stderr.read() or b""
        lines = words.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "a jail ended as it started, without a word"

    def pin_to_core(self, slot: int) -> None:
        """Keep the program to one core, so that all it starts takes no more from its neighbours."""
        assert self._init_process is not None
        core = _AVAILABLE_CORES[(os.getpid() + slot) % len(_AVAILABLE_CORES)]
        with contextlib.suppress(OSError):  # it has gone, or the core has
            os.sched_setaffinity(self._init_process[0], {core})

    async def request_report(self, message: Mapping[str, Any], deadline: float) -> JailReport:
        """Send a message and wait for its report.

        Raises JailLostError if there is none, MemoryLimitError, and TimeoutError at `deadline`
        (of time.monotonic): the driver, which should have ended the program before, did not.
        """
        data = marshal.dumps({**message, "directory": self._folder})
        self._writer.write(driver.LENGTH_FORMAT.pack(len(data)) + data)
        reading = asyncio.create_task(self._read_report())
        pause_s = MEMORY_CHECK_INTERVAL_S
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=pause_s)
                if not reading.done():
                    pause_s = max(
                        MEMORY_CHECK_INTERVAL_S,
                        _PAUSE_PER_CHECK_TIME * await self._enforce_limits(deadline),
                    )
            return reading.result()
        finally:
            reading.cancel()

    async def _enforce_limits(self, deadline: float) -> float:
        """Raise TimeoutError or MemoryLimitError if it is time to; the seconds that looking took.

        It looks in a thread: the kernel lets nobody look while it copies a process.
        """
        started = time.monotonic()
        if started > deadline:
            raise TimeoutError
        if await asyncio.to_thread(self.measure_memory) > self._spec.limits.memory_mib * MIB:
            raise MemoryLimitError
        return time.monotonic() - started

    def measure_memory(self) -> int:
        """What all its processes hold; not much more than its limit is counted. From any thread."""
        assert self._init_process is not None
        enough = self._spec.limits.memory_mib * MIB
        return self._spec.process_table.measure_tree_memory(self._init_process[0], enough=enough)

    async def _read_report(self) -> JailReport:
        try:
            head = driver.REPORT_FORMAT.unpack(
                await self._reader.readexactly(driver.REPORT_FORMAT.size)
            )
            how, code, seconds, cpu_s, out_size, err_size = head
            out = await self._reader.readexactly(out_size)
            err = await self._reader.readexactly(err_size)
            return JailReport(how, code, seconds, cpu_s, out, err)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise JailLostError from error

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, as far as is known."""
        return self._process.poll() is None

    async def kill(self) -> None:
        """Kill all that runs in it and wait until it is gone, with its files.

        Raises DeadlineError if the kernel does not get rid of it.
        """
        if self._init_process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_process[1], signal.SIGKILL)
        else:
            self._process.kill()
        self._writer.transport.abort()
        await self._wait_for_exit()
        assert self._process.stderr is not None
        self._process.stderr.close()
        if self._init_process is not None:
            os.close(self._init_process[1])
            self._init_process = None
        if self._spec.isolation is NO_ISOLATION:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _wait_for_exit(self) -> None:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._exit_fd, gone.set)
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await gone.wait()
        except TimeoutError:
            self._process.kill()
            raise DeadlineError(
                f"a killed jail, process {self._process.pid}, was not gone after {KILL_TIMEOUT_S} s"
            ) from None
        finally:
            loop.remove_reader(self._exit_fd)
            os.close(self._exit_fd)
        self._process.wait()


def _spawn_jail(
    plan: JailSpec, number: int, theirs: socket.socket, info_fd: int
) -> tuple[str, "subprocess.Popen[bytes]"]:
    """Start the processes of a jail: where it may write, and the one that ends when all have."""
    if plan.isolation is NO_ISOLATION:
        folder = tempfile.mkdtemp(prefix="streamrl-unsafe-")
        environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        return folder, _open_process(
            build_boot_command(len(plan.driver_code)), theirs, environment, ()
        )
    filter_fd = os.memfd_create("filter")
    try:
        os.write(filter_fd, plan.syscall_filter)
        os.lseek(filter_fd, 0, os.SEEK_SET)
        command = build_jail_command(
            plan.isolation,
            plan.limits,
            number,
            fds=(filter_fd, info_fd),
            boot=build_boot_command(len(plan.driver_code)),
        )
        return PRIVATE_DIR, _open_process(command, theirs, ENVIRONMENT, (filter_fd, info_fd))
    finally:
        os.close(filter_fd)


def _open_process(
    command: list[str],
    stdin: socket.socket,
    environment: Mapping[str, str],
    pass_fds: tuple[int, ...],
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=stdin.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        pass_fds=pass_fds,
        cwd="/",
    )


def _read_child_pid(said: int) -> int:
    """What bubblewrap says is process 1 of its jail. It has said it by the time the jail waits.

    Raises ValueError if it has not.
    """
    with os.fdopen(said, "rb", closefd=False) as file:
        return int(json.load(file)["child-pid"])
