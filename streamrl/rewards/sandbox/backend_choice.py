"""Choose an isolation mode by running a program that tries to escape from each."""

import asyncio
import importlib
import json
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.rewards.sandbox.isolation import (
    ENVIRONMENT,
    NO_ISOLATION,
    find_bubblewrap,
    list_isolation_modes,
)
from streamrl.rewards.sandbox.jail import (
    Jail,
    JailError,
    JailLostError,
    JailSpec,
    MemoryLimitError,
    make_jail_spec,
)
from streamrl.rewards.sandbox.program import (
    LANGUAGES,
    MIB,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    SandboxProgram,
)
from streamrl.rewards.sandbox.seccomp import build_syscall_filter
from streamrl.rewards.sandbox.verdicts import make_program_message, make_test_message

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
        for command in (language.compile, language.run):
            tool = command[0] if command else ""
            if tool and "{dir}" not in tool and not shutil.which(tool, path=ENVIRONMENT["PATH"]):
                raise ConfigError(
                    f"sandbox.languages: {name} needs {tool}, which is not in {ENVIRONMENT['PATH']}"
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
            return f"{type(error).__name__} {error}".strip()
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
