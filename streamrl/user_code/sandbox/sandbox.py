"""Local sandbox: runs each program in a fresh jail from a pool of jails started ahead.

Its isolation is chosen by running a program that tries to escape from each mode. The seccomp filter
denies system calls that create namespaces, hold memory that no rlimit counts, or reach parts of the
kernel where a bug would be an escape. A denied call fails with EPERM; all other calls are allowed.

Outputs are judged here, on the host. A report of a jail's driver is untrusted, but forging a report
gains nothing: expected outputs never enter the jail. Output is hostile input: long, and built to be
slow to parse. All comparisons work in blocks, so that no single call into C holds the GIL for long.
"""

import asyncio
import codecs
import errno
import importlib
import itertools
import json
import math
import os
import re
import reprlib
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.user_code.pool.background_tasks import run_to_end
from streamrl.user_code.pool.pool import PooledProcess, PoolSettings, ProcessPool, WorkerCrashError
from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox import jail_driver
from streamrl.user_code.sandbox.jail import (
    ENVIRONMENT,
    GRACE_PERIOD_S,
    NO_ISOLATION,
    START_TIMEOUT_S,
    Jail,
    JailError,
    JailLostError,
    JailReport,
    JailSpec,
    MemoryLimitError,
    find_bubblewrap,
    list_isolation_modes,
    make_jail_spec,
)
from streamrl.user_code.sandbox.program import (
    LANGUAGES,
    MIB,
    PYTHON_ONLY,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramResult,
    ProgramTestResult,
    SandboxProgram,
    StdinTest,
)

_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 80
#: Last line of stderr of a program that ran out of memory. A program may print this falsely; the
#: outcome is a failure in any case.
_OUT_OF_MEMORY_TEXTS = ("MemoryError", "bad_alloc", "out of memory", "Cannot allocate memory")


def make_program_message(
    program: SandboxProgram, language: LanguageSpec, limits: ProgramLimits
) -> dict[str, Any]:
    """Return the first message to a jail's driver: program and limits, as marshal types."""
    return {
        "source": str(program.source),
        "file": language.file,
        "run": language.run,
        "compile": language.compile,
        "compile_s": limits.compile_s,
        "stdin": "",
        "limit_address_space": language.limit_address_space,
        "cpu_s": math.ceil(limits.cpu_s),
        "memory_bytes": limits.memory_mib * MIB,
        "disk_bytes": limits.disk_mib * MIB,
        "output_bytes": limits.output_kib * 1024,
        "files": limits.files,
        "processes": limits.processes,
        "open_files": limits.open_files,
    }


def make_test_message(test: StdinTest | CallTest, wall_s: float) -> dict[str, Any]:
    if isinstance(test, StdinTest):
        return {"stdin": str(test.stdin), "wall_s": wall_s}
    arguments = json.dumps(list(test.arguments))
    return {"call": test.function, "arguments": arguments, "wall_s": wall_s}


def judge_report(
    report: JailReport, test: StdinTest | CallTest, program: SandboxProgram, limits: ProgramLimits
) -> ProgramTestResult:
    by_exit = _classify_exit(report, limits)
    passes = by_exit.outcome is RewardOutcome.PASS
    return compare_output(report.out, test, program) if passes else by_exit


def describe_compile_failure(report: JailReport) -> str:
    if report.exit_kind == jail_driver.EXITED and report.exit_code == 0:
        return ""
    lines = report.err.decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if "error" in line]
    stopped = {
        jail_driver.WALL_TIMEOUT: "the compiler took too long",
        jail_driver.OUTPUT_LIMIT: "the compiler wrote too much",
        jail_driver.FILE_LIMIT: "the compiler created too many files",
    }
    return stopped.get(report.exit_kind) or [*errors, *lines, "the compiler failed"][0]


def _classify_exit(report: JailReport, limits: ProgramLimits) -> ProgramTestResult:
    """Judge by the exit alone; PASS for exit code 0 within all limits."""
    last_line = (report.err.decode(errors="replace").strip().splitlines() or [""])[-1]
    stopped = {
        jail_driver.COMPILE_FAILED: (RewardOutcome.COMPILE_ERROR, last_line),
        jail_driver.WALL_TIMEOUT: (RewardOutcome.TIMEOUT, f"ran for more than {limits.wall_s:g} s"),
        jail_driver.OUTPUT_LIMIT: (
            RewardOutcome.OUTPUT_LIMIT,
            f"wrote more than {limits.output_kib} KiB",
        ),
        jail_driver.FILE_LIMIT: (
            RewardOutcome.RUNTIME_ERROR,
            f"created more than {limits.files} files",
        ),
    }
    code = report.exit_code
    if report.exit_kind in stopped:
        return ProgramTestResult(*stopped[report.exit_kind])
    if code == 0:
        return ProgramTestResult(RewardOutcome.PASS)
    if code == -signal.SIGXCPU or (code < 0 and report.cpu_s > limits.cpu_s):
        detail = f"used more than {limits.cpu_s:g} s of CPU time"
        return ProgramTestResult(RewardOutcome.TIMEOUT, detail)
    if any(text in last_line for text in _OUT_OF_MEMORY_TEXTS):
        return ProgramTestResult(RewardOutcome.MEMORY, last_line)
    status = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    return ProgramTestResult(RewardOutcome.RUNTIME_ERROR, last_line or status)


def compare_output(
    out: bytes, test: StdinTest | CallTest, program: SandboxProgram
) -> ProgramTestResult:
    """Return PASS for the expected output, else the outcome and its explanation.

    out: stdout, or the return value as JSON.
    """
    show = _SHORT_REPR.repr
    if isinstance(test, StdinTest):
        actual = decode_output(out)
        if is_same_text(test.stdout, actual, loose_numbers=program.loose_numbers):
            return ProgramTestResult(RewardOutcome.PASS)
        detail = f"wrote {show(actual)}, not {show(test.stdout)}"
        return ProgramTestResult(RewardOutcome.WRONG, detail)
    accepted = " or ".join(map(show, test.accepted))
    if not can_be_value(out, test.accepted):
        detail = f"returned {len(out) >> 10} KiB of other structure, not {accepted}"
        return ProgramTestResult(RewardOutcome.WRONG, detail)
    try:
        value = parse_value(out)
    except ValueError:
        detail = f"{test.function} ended without returning a value"
        return ProgramTestResult(RewardOutcome.RUNTIME_ERROR, detail)
    if any(is_same_value(expected, value) for expected in test.accepted):
        return ProgramTestResult(RewardOutcome.PASS)
    return ProgramTestResult(RewardOutcome.WRONG, f"returned {show(value)}, not {accepted}")


#: Tolerances of numpy.allclose; they apply only if the expected value is a float.
_RELATIVE_TOLERANCE = 1e-5
_ABSOLUTE_TOLERANCE = 1e-8
#: Bytes or characters decoded or split per call.
_BLOCK_SIZE = 1 << 16
_BLANK = re.compile(r"\s")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
#: JSON of this size is parsed only if its structure matches an accepted value (see can_be_value).
_LONG_VALUE_BYTES = 1 << 16
_PART_MARKERS = b"[{,"


def decode_output(data: bytes) -> str:
    """Decode UTF-8 in blocks; invalid bytes become U+FFFD."""
    blocks = (data[start : start + _BLOCK_SIZE] for start in range(0, len(data), _BLOCK_SIZE))
    return "".join(codecs.iterdecode(blocks, "utf-8", errors="replace"))


def is_same_text(expected: str, actual: str, *, loose_numbers: bool) -> bool:
    """Return True if two outputs are equal, ignoring whitespace at the end of lines and text.

    loose_numbers: compare word by word, ignoring all other whitespace. Words that are numbers are
    equal as numbers, approximately if the expected number is a float.
    """
    expected, actual = expected.rstrip(), actual.rstrip()
    if expected == actual:
        return True
    if not loose_numbers:
        lines = zip_longest(_iter_lines(expected), _iter_lines(actual))
        return all(line == actual_line for line, actual_line in lines)
    words = zip_longest(_iter_words(expected), _iter_words(actual))
    return all(_is_same_word(word, actual_word) for word, actual_word in words)


def _iter_lines(text: str) -> Iterator[str]:
    start = 0
    while start <= len(text):
        end = text.find("\n", start + _BLOCK_SIZE)
        end = len(text) if end < 0 else end
        yield from (line.rstrip() for line in text[start:end].split("\n"))
        start = end + 1


def _iter_words(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        blank = _BLANK.search(text, start + _BLOCK_SIZE)
        end = blank.start() if blank else len(text)
        yield from text[start:end].split()
        start = end


def _is_same_word(expected: str | None, actual: str | None) -> bool:
    """Compare two words as text, then as numbers; None: the text has no further words."""
    if expected is None or actual is None or expected == actual:
        return expected == actual
    try:
        if _WHOLE_NUMBER.fullmatch(expected):
            return Decimal(actual) == Decimal(expected)
        return _is_close(float(expected), float(actual))
    except (ValueError, InvalidOperation):
        return False


def is_same_value(expected: Any, actual: Any) -> bool:
    """Return True if two values of JSON types are equal.

    An expected integer is compared exactly, an expected float approximately. Tuples equal lists;
    true differs from 1.
    """
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return expected == actual if isinstance(expected, int) else _is_close(expected, actual)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        is_list = isinstance(actual, list) and len(actual) == len(expected)
        return is_list and all(map(is_same_value, expected, actual))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or {str(key) for key in expected} != actual.keys():
            return False
        return all(is_same_value(value, actual[str(key)]) for key, value in expected.items())
    return type(expected) is type(actual) and bool(expected == actual)


def _is_close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def can_be_value(data: bytes, accepted: Sequence[Any]) -> bool:
    """Return False if JSON `data` cannot equal any accepted value; does not parse the data.

    json.loads holds the GIL, for longer the more containers and elements the data has. Data that
    differs from every accepted value in the counts of "[", "{" and "," is rejected here. Short data
    passes unchecked.
    """
    if len(data) < _LONG_VALUE_BYTES:
        return True
    counts = _count_parts(data)
    return any(counts == _count_parts(json.dumps(value).encode()) for value in accepted)


def _count_parts(data: bytes) -> list[int]:
    blocks = range(0, len(data), _BLOCK_SIZE)
    return [sum(data.count(part, at, at + _BLOCK_SIZE) for at in blocks) for part in _PART_MARKERS]


def parse_value(data: bytes) -> Any:
    """Parse a return value from JSON. Raises ValueError for invalid or too deeply nested data."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


#: Inspecting and controlling other processes, including the driver.
_OTHER_PROCESSES = (
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd"
    " sched_setaffinity sched_setscheduler sched_setattr setpriority migrate_pages move_pages"
)
#: Mounts and namespaces: a program has capabilities inside a namespace that it creates.
_NAMESPACES = (
    "mount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsconfig fsmount"
    " fspick mount_setattr name_to_handle_at open_by_handle_at quotactl"
)
#: Kernel subsystems with many past vulnerabilities, unnecessary for programs under test.
_KERNEL = (
    "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register seccomp"
    " kexec_load kexec_file_load init_module finit_module delete_module create_module acct swapon"
    " swapoff reboot syslog iopl ioperm modify_ldt personality fanotify_init lookup_dcookie"
    " settimeofday clock_settime clock_adjtime adjtimex vhangup nfsservctl uselib"
)
#: Memory that belongs to no process, or survives unmapping: no limit counts it.
_HIDDEN_MEMORY = (
    "memfd_create memfd_secret shmget shmat shmctl shmdt semget semop semtimedop semctl msgget"
    " msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify"
    " add_key request_key keyctl vmsplice io_setup io_submit remap_file_pages mbind set_mempolicy"
    " setxattr lsetxattr fsetxattr"
)
#: Calls that pin whole pages in pipes and sockets but count only the bytes requested. The error is
#: ENOSYS: libraries then fall back to copying, as on an older kernel.
_ZERO_COPY_CALLS = "splice tee sendfile"
#: Observing other processes of the machine, and slowing them down.
_CROSS_PROCESS_EFFECTS = "inotify_init inotify_init1 inotify_add_watch ioprio_set sync syncfs flock"
#: All sockets except socketpair(AF_UNIX), which asyncio and multiprocessing need.
_SOCKETS = "socket bind connect listen accept accept4 setsockopt"

_NEW_NAMESPACE_FLAGS = (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: survives unmapping by a single owner
_TIOCSTI = 0x5412  # injects input into the terminal
_TIOCLINUX = 0x541C
_AF_UNIX = 1
#: POSIX and open-file-description locks (get, set, set and wait), leases and dnotify: a lock on a
#: shared read-only file is a covert channel between jails.
_LOCKS = (5, 6, 7, 36, 37, 38)
_F_SETLEASE, _F_NOTIFY = 1024, 1026
#: System calls newer than libseccomp; their numbers are the same on all architectures. The
#: error is ENOSYS, as on an older kernel.
_NEW_CALLS = range(450, 600)


def build_syscall_filter() -> bytes:
    """Return the seccomp filter as BPF for bubblewrap. Raises RuntimeError without libseccomp."""
    import pyseccomp as seccomp  # imported here: the import itself requires libseccomp

    denied = seccomp.ERRNO(errno.EPERM)
    missing = seccomp.ERRNO(errno.ENOSYS)
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    calls = (_OTHER_PROCESSES, _NAMESPACES, _KERNEL, _HIDDEN_MEMORY, _SOCKETS)
    for name in " ".join((*calls, _CROSS_PROCESS_EFFECTS)).split():
        if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) >= 0:  # exists on this architecture
            rules.add_rule(denied, name)
    for name in _ZERO_COPY_CALLS.split():
        rules.add_rule(missing, name)
    for command in (*_LOCKS, _F_SETLEASE, _F_NOTIFY):
        low_word = seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, command)
        rules.add_rule(denied, "fcntl", low_word)
    for flag in _NEW_NAMESPACE_FLAGS:
        rules.add_rule(denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    # clone3 passes its flags in memory, where seccomp cannot look; libraries fall back to clone.
    rules.add_rule(missing, "clone3")
    shared = seccomp.Arg(3, seccomp.MASKED_EQ, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS)
    rules.add_rule(denied, "mmap", shared)
    rules.add_rule(denied, "socketpair", seccomp.Arg(0, seccomp.NE, _AF_UNIX))
    rules.add_rule(denied, "prlimit64", seccomp.Arg(0, seccomp.NE, 0))
    for request in (_TIOCSTI, _TIOCLINUX):
        low_word = seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request)
        rules.add_rule(denied, "ioctl", low_word)
    for number in _NEW_CALLS:
        rules.add_rule(missing, number)
    return _export_filter(rules)


def _export_filter(rules: Any) -> bytes:
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


UNSAFE_NOTE = (
    "sandbox.allow_unsafe=true and no isolation here: generated code runs with the rights of this"
    " process, held by rlimits alone. This is no sandbox"
)
_UNSAFE_HINT = "or set sandbox.allow_unsafe=true to run generated code with no isolation"
_PROBE_TIMEOUT_S = 20.0
_PROBE_PROCESSES = 8

#: Untrusted program that returns every forbidden action that succeeded.
_PROBE_SOURCE = """
import ctypes, os, socket, time

def probe(port, canary, paths, entries, names, disk_bytes, processes):
    escapes = []
    def attempt(label, action, *arguments):
        try:
            action(*arguments)
        except OSError:
            return
        escapes.append(label)
    attempt("connect to a socket of the host", socket.create_connection, ("127.0.0.1", port), 1)
    attempt("read a file of the host", open, canary)
    for path in paths:
        if os.access(path, os.W_OK):
            escapes.append("write to " + path)
    if set(os.listdir("/")) - set(entries):
        escapes.append("list the directories of the host")
    if set(os.environ) - set(names):
        escapes.append("read the environment of the host")
    for pid in set(range(2, 3000)) - {os.getpid()}:
        attempt("signal a process of the host", os.kill, pid, 0)
    disk = os.statvfs(".")
    if disk.f_blocks * disk.f_frsize > disk_bytes:
        escapes.append("write without limit")
    if ctypes.CDLL(None).unshare(0x10000000) == 0:
        escapes.append("make a user namespace")
    children = 0
    try:
        for _ in range(processes):
            if os.fork() == 0:
                time.sleep(60)
            children += 1
        escapes.append("start processes without limit")
    except OSError:
        pass
    return sorted(set(escapes))
"""


def check_language_tools(languages: Mapping[str, LanguageSpec]) -> None:
    """Raise ConfigError if a language's compiler or interpreter is not on the PATH of jails."""
    for name, language in languages.items():
        for key, command in (("compile", language.compile), ("run", language.run)):
            tool = command[0] if command else ""
            if tool and "{dir}" not in tool and not shutil.which(tool, path=ENVIRONMENT["PATH"]):
                raise ConfigError(
                    f"rewards.language={name}: {key}: {tool}: not found in {ENVIRONMENT['PATH']};"
                    " install it there"
                )


class IsolationError(Exception):
    """Programs cannot be isolated here; the message says why and what to do, before an "or"."""


async def choose_isolation(limits: ProgramLimits, *, allow_unsafe: bool) -> tuple[JailSpec, str]:
    """Return the settings of jails on this machine, and a warning for the user.

    The warning is empty if programs are isolated. Raises ConfigError if programs cannot be
    isolated, unless `allow_unsafe`.
    """
    try:
        return await find_isolation(limits), ""
    except IsolationError as error:
        if not allow_unsafe:
            raise ConfigError(f"sandbox: {error} {_UNSAFE_HINT}") from None
    return make_jail_spec(NO_ISOLATION, limits, b""), UNSAFE_NOTE


async def find_isolation(limits: ProgramLimits) -> JailSpec:
    """Return the settings of jails that isolate programs on this machine. Raises IsolationError."""
    problem = _find_missing_dependency()
    if problem is not None:
        raise IsolationError(problem)
    syscall_filter = build_syscall_filter()
    failures = []
    for isolation in list_isolation_modes():
        spec = make_jail_spec(isolation, limits, syscall_filter)
        failure = await probe_isolation(spec)
        if failure is None:
            return spec
        failures.append(f"{isolation.name}: {failure}")
    raise IsolationError(
        f"no isolation holds here ({'; '.join(failures)}): allow user namespaces, give the"
        " container CAP_SYS_ADMIN,"
    )


def explain_unavailability() -> str | None:
    """Return a line on why this machine cannot isolate programs; None if isolation works."""
    try:
        asyncio.run(choose_isolation(ProgramLimits(), allow_unsafe=False))
    except ConfigError as error:
        return str(error)
    return None


def _find_missing_dependency() -> str | None:
    if sys.platform != "linux":
        return f"isolating programs needs Linux, this is {sys.platform}: use a remote sandbox,"
    if find_bubblewrap() is None:
        return "bwrap is not on PATH: apt install bubblewrap,"
    try:
        importlib.import_module("pyseccomp")
    except (ImportError, RuntimeError) as error:
        return f"no filter of system calls ({error}): apt install libseccomp2,"
    return None


async def probe_isolation(spec: JailSpec) -> str | None:
    """Run _PROBE_SOURCE in a jail; return None, or how it escaped or why the jail failed."""
    limits = replace(
        spec.limits, processes=_PROBE_PROCESSES, wall_s=_PROBE_TIMEOUT_S, cpu_s=_PROBE_TIMEOUT_S
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        program, test = _make_probe_program(limits, server.getsockname()[1])
        jail = None
        try:
            jail = await Jail.start(spec, 0)
            deadline = time.monotonic() + _PROBE_TIMEOUT_S
            await jail.request_report(
                make_program_message(program, LANGUAGES["python"], limits), deadline
            )
            report = await jail.request_report(make_test_message(test, _PROBE_TIMEOUT_S), deadline)
            if not jail.measure_memory():
                return "/proc does not show the memory of the program"
        except (JailError, JailLostError, MemoryLimitError, TimeoutError) as error:
            return str(error) or "the probe ended its jail"
        finally:
            if jail is not None:
                await jail.kill()
    try:
        escapes = json.loads(report.out)
    except ValueError:
        return f"the probe program failed: {report.err.decode(errors='replace')[-200:]}"
    return f"a program could {', '.join(escapes)}" if escapes else None


def _make_probe_program(limits: ProgramLimits, port: int) -> tuple[SandboxProgram, CallTest]:
    """Return the probe and a test with all it must not reach. port: where this process listens."""
    base = Path(sys.base_prefix)
    system = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "dev", "tmp"]
    arguments = [
        port,
        str(Path(__file__).resolve()),
        ["/", "/usr", "/etc", "/dev", str(base / "lib")],
        [*system, base.parts[1]],
        [*ENVIRONMENT, "PWD", "LC_CTYPE"],
        limits.disk_mib * MIB,
        _PROBE_PROCESSES + 1,
    ]
    test = CallTest("probe", arguments, [[]])
    return SandboxProgram("python", _PROBE_SOURCE, [test]), test


#: A jail that dies without a report may be an accident; the second time blames the program.
_JAILS_PER_TEST = 2
#: Longer outputs are compared in a thread, not in the event loop.
_LONG_TEXT = 1 << 16


class Sandbox:
    """Runs untrusted programs in FIFO order, at most `jails` concurrently. Create with `start`.

    user_warning: warning for the user; empty if programs are isolated.
    """

    def __init__(
        self, jail_spec: JailSpec, jails: int, languages: Mapping[str, LanguageSpec]
    ) -> None:
        self.user_warning = ""
        self._jail_spec = jail_spec
        self._languages = languages
        self._slots = list(range(jails))
        self._slot_semaphore = asyncio.Semaphore(jails)
        numbers = itertools.count()
        self._pool = ProcessPool(
            "the sandbox",
            lambda: Jail.start(jail_spec, next(numbers)),
            PoolSettings(jails, is_isolated=True, max_spares=jails),
        )

    @classmethod
    async def start(
        cls,
        limits: ProgramLimits,
        *,
        jails: int = 0,
        languages: Mapping[str, LanguageSpec] = PYTHON_ONLY,
        allow_unsafe: bool = False,
    ) -> "Sandbox":
        """Choose and probe an isolation mode, and start a sandbox for programs in `languages`.

        jails: concurrent programs; 0: the number of available cores.

        Raises ConfigError if this machine cannot isolate programs (unless `allow_unsafe`), lacks
        the tools of a language, or does not start a jail.
        """
        check_language_tools(languages)
        jail_spec, warning = await choose_isolation(limits, allow_unsafe=allow_unsafe)
        sandbox = cls(jail_spec, jails or len(os.sched_getaffinity(0)), languages)
        sandbox.user_warning = warning
        try:
            await sandbox._pool.start()
        except WorkerCrashError as error:
            raise ConfigError(f"sandbox: {error}") from None
        return sandbox

    async def run(self, program: SandboxProgram) -> ProgramResult:
        """Run and judge the program's tests in order; function-call tests are for Python only."""
        language = self._languages[program.language]
        async with self._slot_semaphore:
            slot = self._slots.pop()
            program_run = ProgramRun(program, language, self._jail_spec.limits, self._pool)
            try:
                return ProgramResult(await program_run.run_tests(slot), len(program.tests))
            finally:
                program_run.release_jail()
                self._slots.append(slot)

    async def close(self) -> None:
        """Kill all jails; running programs end with INFRA_ERROR."""
        await self._pool.close()


class CompileFailedError(Exception):
    """Compiling the program failed; the message is the compiler's error."""


_OUTCOMES: Mapping[type[Exception], RewardOutcome] = {
    CompileFailedError: RewardOutcome.COMPILE_ERROR,
    WorkerCrashError: RewardOutcome.INFRA_ERROR,
    MemoryLimitError: RewardOutcome.MEMORY,
    TimeoutError: RewardOutcome.TIMEOUT,
}


@dataclass
class ProgramRun:
    """Runs the tests of a program in a jail of `pool`.

    Call `release_jail` afterwards. limits.total_s counts time in jails, not waiting for a jail.
    """

    program: SandboxProgram
    language: LanguageSpec
    limits: ProgramLimits
    pool: ProcessPool[Jail]

    def __post_init__(self) -> None:
        self._claim: PooledProcess[Jail] | None = None
        self._used_s = 0.0  # excludes waiting for a jail

    async def run_tests(self, slot: int) -> tuple[ProgramTestResult, ...]:
        """Run the tests, to the first failure if program.stop_early. slot: selects the core."""
        results: list[ProgramTestResult] = []
        for test in self.program.tests:
            result = await self._run_test(test, slot)
            results.append(result)
            is_fatal = result.outcome in (RewardOutcome.COMPILE_ERROR, RewardOutcome.INFRA_ERROR)
            if is_fatal or (self.program.stop_early and result.outcome is not RewardOutcome.PASS):
                break
        return tuple(results)

    def release_jail(self) -> None:
        """Give back the jail, which is then killed. Idempotent."""
        if self._claim is not None:
            self.pool.release(self._claim)
            self._claim = None

    async def _run_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        outcome, detail = RewardOutcome.RUNTIME_ERROR, "the program killed its jail"
        for _ in range(_JAILS_PER_TEST):
            try:
                return await self._try_test(test, slot)
            except JailLostError:
                self.release_jail()
            except tuple(_OUTCOMES) as error:
                outcome, detail = _OUTCOMES[type(error)], str(error)
                break
        self.release_jail()
        return ProgramTestResult(outcome, detail)

    async def _try_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        if self._claim is None:
            self._claim = await self.pool.claim()
            self._claim.process.pin_to_core(slot)
            await self._compile_program(self._claim.process)
        wall_s = min(self.limits.wall_s, self.limits.total_s - self._used_s)
        if wall_s <= 0:
            return ProgramTestResult(
                RewardOutcome.TIMEOUT, f"all tests together took {self.limits.total_s:g} s"
            )
        report = await self._request_report(
            self._claim.process, make_test_message(test, wall_s), wall_s
        )
        expected_size = len(test.stdout) if isinstance(test, StdinTest) else 0
        if len(report.out) + expected_size < _LONG_TEXT:
            return judge_report(report, test, self.program, self.limits)
        return await asyncio.to_thread(judge_report, report, test, self.program, self.limits)

    async def _compile_program(self, jail: Jail) -> None:
        message = make_program_message(self.program, self.language, self.limits)
        try:
            report = await self._request_report(jail, message, self.limits.compile_s)
        except MemoryLimitError as error:
            raise CompileFailedError("the compiler took too much memory") from error
        except TimeoutError as error:
            raise CompileFailedError("the compiler took too long") from error
        failure = describe_compile_failure(report)
        if failure:
            raise CompileFailedError(failure)

    async def _request_report(
        self, jail: Jail, message: dict[str, object], seconds: float
    ) -> JailReport:
        started = time.monotonic()
        try:
            return await jail.request_report(message, started + seconds + GRACE_PERIOD_S)
        finally:
            self._used_s += time.monotonic() - started


@dataclass(frozen=True)
class CodeOutput:
    """Output of a call: what the code printed, and its last value or its exception.

    num_left_out: characters left out in the middle of `text`.
    has_failed: the code raised, or ended the session.
    is_over: the session has ended, and its variables are lost.
    """

    text: str
    num_left_out: int = 0
    has_failed: bool = False
    is_over: bool = False


class PythonSession:
    """Interpreter in a jail. Create with `start`; the jail lives until `kill`.

    limits.cpu_s is the CPU time of a process in all calls together. The other limits in seconds do
    not apply: the caller cancels a call that takes too long, and kills the session.
    """

    def __init__(self, jail: Jail, spec: JailSpec) -> None:
        self._jail = jail
        self._limits = spec.limits

    @classmethod
    async def start(cls, spec: JailSpec, number: int, *, kept_chars: int) -> "PythonSession":
        """Start a jail with an interpreter. Raises JailError.

        number: index of the jail (`Jail.start`). kept_chars:
        characters at each end of a long output that are kept; those between are counted.
        """
        jail = await Jail.start(spec, number)
        try:
            jail.pin_to_core(number)
            program = SandboxProgram("python", "", [])
            limits = make_program_message(program, LANGUAGES["python"], spec.limits)
            # A character of UTF-8 has up to four bytes.
            message = {**limits, "end_bytes": 4 * kept_chars}
            await jail.request_report(message, time.monotonic() + START_TIMEOUT_S)
        except BaseException as error:
            await run_to_end(jail.kill())
            if isinstance(error, JailLostError | MemoryLimitError | TimeoutError):
                raise JailError(f"the interpreter of a jail does not start: {error}") from error
            raise
        return cls(jail, spec)

    async def run(self, code: str) -> CodeOutput:
        """Run code, and wait until it ends. After a call that was cancelled, kill the session."""
        try:
            report = await self._jail.request_report({"code": code}, math.inf)
        except MemoryLimitError as error:
            return CodeOutput(str(error), has_failed=True, is_over=True)
        except JailLostError:
            return CodeOutput("the code ended its jail", has_failed=True, is_over=True)
        return self._read_output(report)

    def _read_output(self, report: JailReport) -> CodeOutput:
        num_left_out = report.exit_code
        if num_left_out:
            text = decode_output(report.out) + decode_output(report.err)
        else:
            text = decode_output(report.out + report.err)
        if report.exit_kind == jail_driver.FILE_LIMIT:
            text += f"\ncreated more than {self._limits.files} files"
        is_over = report.exit_kind in (jail_driver.EXITED, jail_driver.FILE_LIMIT)
        has_failed = is_over or report.exit_kind == jail_driver.RAISED
        return CodeOutput(text, num_left_out, has_failed, is_over)

    async def kill(self) -> None:
        """Kill all processes of the session, and wait for their exit. Raises DeadlineError."""
        await self._jail.kill()
