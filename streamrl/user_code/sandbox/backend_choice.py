"""Choose an isolation mode by running a program that tries to escape from each.

The seccomp filter denies system calls that create namespaces, hold memory that no rlimit counts, or
reach parts of the kernel where a bug would be an escape. A denied call fails with EPERM; all other
calls are allowed.
"""

import asyncio
import errno
import importlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError
from streamrl.user_code.sandbox.jail import (
    ENVIRONMENT,
    NO_ISOLATION,
    Jail,
    JailError,
    JailLostError,
    JailSpec,
    MemoryLimitError,
    find_bubblewrap,
    list_isolation_modes,
    make_jail_spec,
)
from streamrl.user_code.sandbox.program import (
    LANGUAGES,
    MIB,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    SandboxProgram,
)
from streamrl.user_code.sandbox.verdicts import make_program_message, make_test_message

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
