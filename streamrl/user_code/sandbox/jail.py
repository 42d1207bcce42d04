"""A jail: the isolated process tree of a program, from start to guaranteed end.

bubblewrap gives each jail its own namespaces and a read-only view of system directories. Programs
in a jail run without capabilities, and never as the user of the run.
"""

import asyncio
import contextlib
import json
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import DeadlineError
from streamrl.user_code.pool.background_tasks import run_to_end
from streamrl.user_code.pool.proc_stats import ProcessTable, list_children_by_parent
from streamrl.user_code.pool.process import ProcessExitedError
from streamrl.user_code.sandbox import jail_driver
from streamrl.user_code.sandbox.program import MIB, ProgramLimits

#: The only writable directory of a jail.
PRIVATE_DIR = "/tmp"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": PRIVATE_DIR,
    "TMPDIR": PRIVATE_DIR,
    "LANG": "C.UTF-8",
}
_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache")
_DEVICES = ("null", "urandom")  # not zero: mapping it shared gives unlimited uncounted memory
_NAMESPACE_OPTIONS = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--as-pid-1", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL"),
)
#: Each jail of a machine has its own user id because RLIMIT_NPROC counts processes by user. Ids lie
#: above those that systems assign, with 256 per process id of a scorer.
_FIRST_USER_ID = 1 << 30
_USERS_PER_PROCESS = 256
_NUM_USER_IDS = 1 << 32

#: First code of the jail's Python: read the driver's code from stdin and execute it.
_BOOT_SOURCE = (
    "import marshal,os,sys\n"
    "size,data={size},b''\n"
    "while len(data)<size: data+=os.read(0,size-len(data)) or os._exit(0)\n"
    "module=sys.modules['__main__']=type(sys)('__main__')\n"
    "exec(marshal.loads(data),module.__dict__)"
)


@dataclass(frozen=True)
class IsolationMode:
    """Configuration of namespaces and users of a jail.

    name: used in messages. has_user_namespace: the jail has its own user namespace.
    has_dedicated_user: each jail runs as its own user id, which requires root.
    """

    name: str
    has_user_namespace: bool
    has_dedicated_user: bool


#: Mode for sandbox.allow_unsafe: rlimits only.
NO_ISOLATION = IsolationMode("none", has_user_namespace=False, has_dedicated_user=False)


def list_isolation_modes() -> list[IsolationMode]:
    """Return the isolation modes that this user may try on this machine, strongest first."""
    if os.geteuid() != 0:
        return [IsolationMode("user namespace", has_user_namespace=True, has_dedicated_user=False)]
    if not _has_all_user_ids() or shutil.which("setpriv") is None:
        return [
            IsolationMode(
                "user namespace of root", has_user_namespace=True, has_dedicated_user=False
            )
        ]
    return [
        IsolationMode("root", has_user_namespace=False, has_dedicated_user=True),
        IsolationMode(
            "user namespace of a user of its own", has_user_namespace=True, has_dedicated_user=True
        ),
    ]


def _has_all_user_ids() -> bool:
    """Return True if root here can use every user id, unlike root of a restricted container."""
    inside, _, count = Path("/proc/self/uid_map").read_text().split()[:3]
    return (inside, int(count)) == ("0", _NUM_USER_IDS - 1)


def find_bubblewrap() -> str | None:
    """Return the path of bwrap on PATH or in the Python environment, or None."""
    return shutil.which("bwrap") or shutil.which("bwrap", path=f"{sys.prefix}/bubblewrap")


def compute_jail_user(number: int) -> int:
    return _FIRST_USER_ID + os.getpid() * _USERS_PER_PROCESS + number % _USERS_PER_PROCESS


def build_jail_command(
    isolation: IsolationMode,
    limits: ProgramLimits,
    number: int,
    *,
    fds: tuple[int, int],
    boot: Sequence[str],
) -> list[str]:
    """Return the command that creates jail `number` and runs the command `boot` in it.

    fds: descriptors for bubblewrap: the seccomp filter to read, and the pipe for the child's pid.
    """
    bubblewrap = find_bubblewrap()
    assert bubblewrap is not None, "checked by choose_isolation"
    user_id = compute_jail_user(number)
    user = ["setpriv", f"--reuid={user_id}", f"--regid={user_id}"]
    user += ["--clear-groups", "--inh-caps=-all", "--no-new-privs", "--pdeathsig=KILL"]
    jail = [bubblewrap, *_NAMESPACE_OPTIONS, *_build_mount_options(limits)]
    jail += ["--unshare-user"] if isolation.has_user_namespace else []
    jail += ["--seccomp", str(fds[0]), "--info-fd", str(fds[1])]
    if not isolation.has_dedicated_user:
        return [*jail, *boot]
    if isolation.has_user_namespace:
        return [*user, *jail, *boot]
    # setpriv inside the jail needs these to change the user; it drops all capabilities afterwards.
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        jail += ["--cap-add", capability]
    return [*jail, *user, "--bounding-set=-all", *boot]


def build_boot_command(size: int) -> list[str]:
    return [
        find_python(),
        *["-I", "-S", "-B", "-X", "utf8", "-X", "no_debug_ranges", "-c"],
        _BOOT_SOURCE.format(size=size),
    ]


def find_python() -> str:
    """Return the path of the base interpreter; jails do not see a virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix, "bin", version))


def _build_mount_options(limits: ProgramLimits) -> list[str]:
    """Mount system and Python directories read-only, and a private tmpfs."""
    view = []
    for path in _SYSTEM_DIRS:
        view += (
            ["--symlink", os.readlink(path), path]
            if os.path.islink(path)
            else _bind_read_only([path])
        )
    base = Path(sys.base_prefix)
    folders = ["/etc", "/dev"]
    read_only = list(_SYSTEM_SETTINGS)
    if not base.is_relative_to("/usr"):
        folders += map(str, [*reversed(base.parents[:-1]), base])
        read_only += [str(base / "bin"), str(base / "lib")]
    for folder in folders:
        view += ["--perms", "0755", "--dir", folder]  # bubblewrap's default mode is root only
    view += _bind_read_only(read_only)
    # Hide installed packages.
    packages = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    if os.path.isdir(packages):
        view += ["--tmpfs", packages, "--remount-ro", packages]
    for device in _DEVICES:
        view += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    view += ["--symlink", "urandom", "/dev/random"]
    view += ["--symlink", f"{PRIVATE_DIR}/stdin", "/dev/stdin"]  # no /proc in a jail
    view += ["--symlink", PRIVATE_DIR, "/dev/shm"]  # for multiprocessing locks
    view += ["--perms", "1777", "--size", str(limits.disk_mib * MIB), "--tmpfs", PRIVATE_DIR]
    return [*view, "--remount-ro", "/", "--chdir", PRIVATE_DIR]


def _bind_read_only(paths: Sequence[str]) -> list[str]:
    return [part for path in paths for part in ("--ro-bind-try", path, path)]


#: Longest time until a started jail reports READY.
START_TIMEOUT_S = 20.0
#: Time for the jail driver's overhead on top of a test's deadline.
GRACE_PERIOD_S = 3.0
#: Longest time until all processes of a killed jail have exited.
KILL_TIMEOUT_S = 20.0
_REAP_TIMEOUT_S = 3.0
#: Memory checks of a running program: at least this interval, and at least this multiple of the
#: check's duration, which grows with the number of mappings.
MEMORY_CHECK_INTERVAL_S = 0.05
_PAUSE_PER_CHECK_TIME = 2
#: Memory charged per mapping. An empty mapping takes about 220 bytes in the kernel, and about 2 KiB
#: in grandchild processes. The charge is higher, so that a program with many mappings exceeds its
#: limit before counting them takes long.
_MAPPING_BYTES = 16 << 10
_AVAILABLE_CORES = tuple(sorted(os.sched_getaffinity(0)))


class JailError(ProcessExitedError):
    """Creating a jail failed."""


class JailLostError(Exception):
    """A jail ended before its process 1 (jail_driver.py) reported; the sandbox did not kill it."""


class MemoryLimitError(Exception):
    """The processes of a jail together exceeded memory_mib."""


@dataclass(frozen=True)
class JailReport:
    """Report of a jail's driver on a compilation or test. Untrusted.

    exit_kind: EXITED or another constant of jail_driver.py.
    exit_code: exit code, negative: a signal.
    cpu_s: CPU time.
    out: stdout, or a function's return value as JSON.
    err: end of stderr.
    """

    exit_kind: int
    exit_code: int
    cpu_s: float
    out: bytes
    err: bytes


@dataclass(frozen=True)
class JailSpec:
    """Settings shared by all jails of a sandbox.

    syscall_filter: seccomp filter as BPF.
    driver_code: code of jail_driver.py, marshaled.
    process_table: measures the memory of jails.
    """

    isolation: IsolationMode
    limits: ProgramLimits
    syscall_filter: bytes
    driver_code: bytes
    process_table: ProcessTable


def make_jail_spec(
    isolation: IsolationMode, limits: ProgramLimits, syscall_filter: bytes
) -> JailSpec:
    return JailSpec(
        isolation,
        limits,
        syscall_filter,
        compile_driver(),
        ProcessTable(mapping_bytes=_MAPPING_BYTES),
    )


def compile_driver() -> bytes:
    source = Path(jail_driver.__file__).read_text(encoding="utf-8")
    return marshal.dumps(compile(source, "driver", "exec", dont_inherit=True, optimize=2))


class Jail:
    """A running jail: the isolated processes of a single program. Create with `start`."""

    is_async = False
    exit_reason = "a jail exited before a program was sent to it"

    def __init__(self, spec: JailSpec, folder: str, process: "subprocess.Popen[bytes]") -> None:
        self._spec = spec
        self._folder = folder
        self._process = process
        self._exit_fd = os.pidfd_open(process.pid)
        self._init_process: tuple[int, int] | None = None  # pid and pidfd of the jail's process 1
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, spec: JailSpec, number: int) -> "Jail":
        """Start a jail and wait until its driver is ready. Raises JailError.

        number: index of the jail, which gives its user id. The jail dies with the calling thread
            (parent-death signal): call from a long-lived thread.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            info_fd, info_write_fd = os.pipe()
            try:
                jail = cls(spec, *_spawn_jail(spec, number, theirs, info_write_fd))
            except OSError as error:
                writer.close()
                os.close(info_fd)
                raise JailError(f"starting a jail failed: {error}") from error
            finally:
                os.close(info_write_fd)
        jail._reader, jail._writer = reader, writer
        try:
            await jail._boot_driver(info_fd)
        except BaseException:
            await run_to_end(jail.kill())
            raise
        finally:
            os.close(info_fd)
        return jail

    async def _boot_driver(self, info_fd: int) -> None:
        self._writer.write(self._spec.driver_code)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._read_report()
            is_direct = self._spec.isolation is NO_ISOLATION
            pid = self._process.pid if is_direct else _read_child_pid(info_fd)
            self._init_process = (pid, os.pidfd_open(pid))
        except (JailLostError, ProcessLookupError, ValueError) as error:
            raise JailError(self._read_last_error()) from error
        except TimeoutError as error:
            raise JailError(f"a jail was not ready after {START_TIMEOUT_S:.0f} s") from error

    def _read_last_error(self) -> str:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        data = self._process.stderr.read() or b""
        lines = data.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "a jail exited at its start without an error message"

    def pin_to_core(self, slot: int) -> None:
        """Pin the jail to a core, so that concurrent programs do not slow each other down.

        slot: index among the concurrent programs. Errors are ignored: the jail, or the core, may be
            gone.
        """
        core = _AVAILABLE_CORES[(os.getpid() + slot) % len(_AVAILABLE_CORES)]
        with contextlib.suppress(OSError):
            os.sched_setaffinity(self.pid, {core})

    async def request_report(self, message: Mapping[str, Any], deadline: float) -> JailReport:
        """Send a program or test to the jail's driver and wait for the report; enforce memory_mib.

        Raises JailLostError if the jail ends, MemoryLimitError, and TimeoutError at `deadline`
        (time.monotonic) in case the driver fails to stop the program at its own deadline.
        """
        data = marshal.dumps({**message, "directory": self._folder})
        self._writer.write(jail_driver.LENGTH_FORMAT.pack(len(data)) + data)
        reading = asyncio.create_task(self._read_report())
        pause_s = MEMORY_CHECK_INTERVAL_S
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=pause_s)
                if not reading.done():
                    took_s = await self._enforce_limits(deadline)
                    pause_s = max(MEMORY_CHECK_INTERVAL_S, _PAUSE_PER_CHECK_TIME * took_s)
            return reading.result()
        finally:
            reading.cancel()

    async def _enforce_limits(self, deadline: float) -> float:
        """Return the seconds that the check took."""
        started = time.monotonic()
        if started > deadline:
            raise TimeoutError("did not end before its deadline")
        # In a thread: reading /proc blocks while the kernel forks a large process.
        limit_mib = self._spec.limits.memory_mib
        if await asyncio.to_thread(self.measure_memory) > limit_mib * MIB:
            raise MemoryLimitError(f"used more than {limit_mib} MiB")
        return time.monotonic() - started

    def measure_memory(self) -> int:
        """Return the memory of the jail, bytes, counted up to memory_mib. Thread-safe."""
        enough = self._spec.limits.memory_mib * MIB
        return self._spec.process_table.measure_tree_memory(self.pid, enough=enough)

    async def _read_report(self) -> JailReport:
        try:
            head = jail_driver.REPORT_FORMAT.unpack(
                await self._reader.readexactly(jail_driver.REPORT_FORMAT.size)
            )
            exit_kind, exit_code, cpu_s, out_size, err_size = head
            out = await self._reader.readexactly(out_size)
            err = await self._reader.readexactly(err_size)
            return JailReport(exit_kind, exit_code, cpu_s, out, err)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise JailLostError from error

    @property
    def pid(self) -> int:
        """Pid of the jail's process 1."""
        assert self._init_process is not None
        return self._init_process[0]

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    async def kill(self) -> None:
        """Kill all processes, wait for their exit, delete their files. Raises DeadlineError."""
        if self._init_process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init_process[1], signal.SIGKILL)
        else:
            await asyncio.to_thread(_kill_tree, self._process.pid)
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
                f"process {self._process.pid} of a killed jail did not exit in {KILL_TIMEOUT_S:g} s"
            ) from None
        finally:
            loop.remove_reader(self._exit_fd)
            os.close(self._exit_fd)
        self._process.wait()


def _spawn_jail(
    spec: JailSpec, number: int, theirs: socket.socket, info_fd: int
) -> tuple[str, "subprocess.Popen[bytes]"]:
    """Return the writable directory of a jail, and its process that exits after all others."""
    folder, environment = PRIVATE_DIR, ENVIRONMENT
    command = build_boot_command(len(spec.driver_code))
    pass_fds: tuple[int, ...] = ()
    with os.fdopen(os.memfd_create("filter"), "w+b", buffering=0) as filter_file:
        if spec.isolation is NO_ISOLATION:
            folder = tempfile.mkdtemp(prefix="streamrl-unsafe-")
            environment = {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder}
        else:
            filter_file.write(spec.syscall_filter)
            filter_file.seek(0)
            pass_fds = fds = (filter_file.fileno(), info_fd)
            command = build_jail_command(spec.isolation, spec.limits, number, fds=fds, boot=command)
        return folder, subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=pass_fds,
            cwd="/",
        )


def _kill_tree(pid: int) -> None:
    """Kill a child of this process that is starting, with its own children.

    A child of bwrap that waits to be set up has no parent-death signal yet. bwrap reaps it and
    exits: reaped by nobody, it would count as a process of the jail's user for good.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # it starts no further child
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    children = list_children_by_parent()
    members = [*children.get(pid, ())]
    for member in members:
        members += children.get(member, ())
    for member in members:
        _signal_and_wait(member, signal.SIGKILL, KILL_TIMEOUT_S)
    if members and _signal_and_wait(pid, signal.SIGCONT, _REAP_TIMEOUT_S):
        return
    _signal_and_wait(pid, signal.SIGKILL, KILL_TIMEOUT_S)


def _signal_and_wait(pid: int, number: signal.Signals, timeout_s: float) -> bool:
    """Send a signal to a process; return whether it exits in time."""
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as pidfd:
        signal.pidfd_send_signal(pidfd.fileno(), number)
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    return True


def _read_child_pid(info_fd: int) -> int:
    with os.fdopen(info_fd, "rb", closefd=False) as file:
        return int(json.load(file)["child-pid"])
