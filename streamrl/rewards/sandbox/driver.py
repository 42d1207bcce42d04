"""What waits in a jail for a program, runs its tests one after another, and reports.

It is process 1 of the jail, so that no signal from inside reaches it, and its end ends all. It is
sent there as code, talks over the socket it finds as stdin, and knows no expected output: what it
reports is what came out, and the verdict is made outside (verdicts.py). It imports little, for each
jail starts its own.
"""

import _signal as signal  # what it is made of: `signal` itself is slow to import
import builtins
import marshal
import os
import resource
import select
import struct
import sys
import time
from _sitebuiltins import Quitter

#: How a run ended, the first number of a report.
READY, EXITED, WALL_TIMEOUT, OUTPUT_LIMIT, FILE_LIMIT, COMPILE_FAILED = range(6)
#: The others: exit code (below 0: a signal), seconds, CPU seconds, bytes of output and of errors.
REPORT_FORMAT = struct.Struct("!BiddII")
LENGTH_FORMAT = struct.Struct("!I")
_HOST_FD = 200  # the descriptor of the socket, away from those that a program is given
_MAX_ERROR_BYTES = 4096
_TICK_MS = 50
_MAX_FDS = 1 << 12
_EXEC_STACK_BYTES = 64 << 20

#: What a message of the host says: of the program (first), then of each test.
JobMessage = dict
_IS_JAILED = os.getpid() == 1


def main() -> None:
    """Serve the host until it hangs up. In the fork for a Python program: run that, and return."""
    os.dup2(0, _HOST_FD)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, _HOST_FD)
    os.closerange(_HOST_FD + 1, _MAX_FDS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for process 1 that is to be deaf to it
    builtins.exit = Quitter("exit", "Ctrl-D")  # type: ignore[assignment]
    builtins.quit = Quitter("quit", "Ctrl-D")  # type: ignore[assignment]
    send_report(READY)
    program = receive_message()
    if prepare_program(program):
        return
    kept = read_compiled_files()
    while True:
        job = {**program, **receive_message()}
        reset_workspace(program, kept)
        if run_job(job):
            return


def receive_message() -> JobMessage:
    """The next message of the host; the end, and with it the jail's, if there is none."""
    (length,) = LENGTH_FORMAT.unpack(_read_exactly(LENGTH_FORMAT.size))
    message: JobMessage = marshal.loads(_read_exactly(length))
    return message


def _read_exactly(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(_HOST_FD, min(size, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send_report(
    how: int,
    code: int = 0,
    seconds: float = 0.0,
    cpu_s: float = 0.0,
    out: bytes = b"",
    err: bytes = b"",
) -> None:
    """Tell the host how a run ended."""
    data = REPORT_FORMAT.pack(how, code, seconds, cpu_s, len(out), len(err)) + out + err
    while data:
        data = data[os.write(_HOST_FD, data) :]


def prepare_program(program: JobMessage) -> bool:
    """Write the source where its language wants it and compile it; report how that went."""
    os.chdir(program["directory"])
    if os.listdir("."):  # `reset_workspace` is only for what is ours alone
        os._exit(1)
    os.mkdir("program")
    os.mkdir("work")
    if program["run"]:
        path = f"program/{program['file']}"
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(program["source"])
    if program["compile"]:
        return run_job({**program, "run": program["compile"], "wall_s": program["compile_s"]})
    send_report(EXITED)
    return False


def read_compiled_files() -> list[tuple[str, int, bytes]]:
    """What compiling made, as path, mode and content: a test may change it, for itself alone."""
    kept = []
    for folder, _, names in os.walk("program"):
        for name in names:
            path = f"{folder}/{name}"
            with open(path, "rb") as file:
                kept.append((path, os.fstat(file.fileno()).st_mode, file.read()))
    return kept


def reset_workspace(program: JobMessage, kept: list[tuple[str, int, bytes]]) -> None:
    """Remove what an earlier test left, however deep it is, and put there what was compiled."""
    os.chdir(program["directory"])
    left = os.listdir(".")
    while left:
        name = left.pop()
        if os.path.islink(name) or not os.path.isdir(name):
            os.unlink(name)
            continue
        os.chmod(name, 0o700)
        for inner in os.listdir(name):
            moved = f".{time.monotonic_ns()}"
            if not os.path.islink(f"{name}/{inner}"):
                os.chmod(f"{name}/{inner}", 0o700)
            os.rename(f"{name}/{inner}", moved)
            left.append(moved)
        os.rmdir(name)
    os.mkdir("program")
    os.mkdir("work")
    for path, mode, content in kept:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, mode & 0o777)


def run_job(job: JobMessage) -> bool:
    """Run one command or Python program and report; true in the process that is that program."""
    with open("stdin", "w", encoding="utf-8", errors="replace") as file:
        file.write(job["stdin"])
    if "call" in job:
        __import__("json")  # once, and not in each fork
    pipes = [os.pipe() for _ in range(4)]
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        exec_program(job, [write for _, write in pipes])
        return True
    for _, write in pipes:
        os.close(write)
    streams = [PipeReader(read, job["output_bytes"]) for read, _ in pipes]
    how = wait_for_exit(pid, streams, job, started + job["wall_s"])
    code, cpu_s = kill_all(pid)
    seconds = time.monotonic() - started
    for stream in streams:
        stream.drain()
    out, err, value, note = streams
    if how == EXITED and any(stream.is_full for stream in streams):
        how = OUTPUT_LIMIT
    if note.data:
        how, err = COMPILE_FAILED, note
    result = value if "call" in job else out
    send_report(how, code, seconds, cpu_s, bytes(result.data), bytes(err.data[-_MAX_ERROR_BYTES:]))
    return False


class PipeReader:
    """The reading end of a pipe from the program, up to `limit` bytes."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.data = bytearray()
        self._limit = limit

    @property
    def is_full(self) -> bool:
        """Whether more came than may."""
        return len(self.data) > self._limit

    def read(self) -> bool:
        """Take what is there; false at the end."""
        part = os.read(self.fd, 1 << 16)
        self.data += part
        return bool(part)

    def drain(self) -> None:
        """Read what is left in the pipe of a program that has ended, and close it."""
        os.set_blocking(self.fd, False)
        try:
            while not self.is_full and self.read():
                pass
        except BlockingIOError:  # somebody outside of a jail holds on to it
            pass
        os.close(self.fd)


def wait_for_exit(pid: int, streams: list[PipeReader], job: JobMessage, deadline: float) -> int:
    """Wait until process `pid` ends, or must be ended: how it came to that."""
    ended = os.pidfd_open(pid)
    poller = select.poll()
    by_fd = {stream.fd: stream for stream in streams}
    for fd in (ended, _HOST_FD, *by_fd):
        poller.register(fd, select.POLLIN)
    how = None
    while how is None:
        for fd, _ in poller.poll(_TICK_MS):
            if fd == _HOST_FD:  # nothing more is to come: the host is gone
                os._exit(0)
            if fd == ended:
                how = EXITED
            elif not by_fd[fd].read():
                poller.unregister(fd)
        if how is None and any(stream.is_full for stream in streams):
            how = OUTPUT_LIMIT
        elif how is None and time.monotonic() > deadline:
            how = WALL_TIMEOUT
        elif how is None and _IS_JAILED and has_too_many_files(job):
            how = FILE_LIMIT
        reap_orphans(but=pid)
    os.close(ended)
    return how


def has_too_many_files(job: JobMessage) -> bool:
    """Whether there are more files than the limit; memory that is in no process."""
    found = os.statvfs(job["directory"])
    return found.f_files - found.f_ffree > job["files"]


def reap_orphans(but: int) -> None:
    """Collect processes that the program left behind, which count as processes until then."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == but:
            return
        os.waitpid(found.si_pid, 0)


def kill_all(pid: int) -> tuple[int, float]:
    """Kill everything there is but this process; exit code and CPU seconds of process `pid`."""
    if _IS_JAILED:
        os.kill(-1, signal.SIGKILL)
    else:
        os.killpg(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    while _IS_JAILED:
        try:
            os.wait()
        except ChildProcessError:
            break
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def exec_program(job: JobMessage, pipes: list[int]) -> None:
    """Turn this fork into the program, within its limits."""
    out, err, value, note = pipes
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    first, second = sorted((value, note))
    os.closerange(3, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, _MAX_FDS)
    if not _IS_JAILED:
        os.setsid()
    os.chdir("work")
    set_rlimits(job)
    if not job["run"]:
        run_python(job, value, note)
        return
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    command = [part.replace("{dir}", job["directory"] + "/program") for part in job["run"]]
    os.closerange(first, second + 1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}".encode())
        os._exit(127)


def set_rlimits(job: JobMessage) -> None:
    """Bound what this process and those it starts may use."""
    limits = {
        # First, a second earlier, comes a signal that says why, but can be ignored.
        resource.RLIMIT_CPU: job["cpu_s"] + 1,
        resource.RLIMIT_FSIZE: job["disk_bytes"],
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_SIGPENDING: job["processes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if job["run"]:
        limits[resource.RLIMIT_STACK] = _EXEC_STACK_BYTES
    if job["limit_address_space"]:
        limits[resource.RLIMIT_AS] = job["memory_bytes"]
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, allowed))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(job["cpu_s"], hard), hard))


def run_python(job: JobMessage, value: int, note: int) -> None:
    """Run the source as a script, or call its function and write what that returns to `value`.

    What is written to `note`, which is closed before the program begins, is why there is none.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = compile(job["source"], job["file"], "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        os.write(
            note, f"{type(error).__name__}: {error}".encode(errors="replace")[:_MAX_ERROR_BYTES]
        )
        os._exit(1)
    os.close(note)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = [job["file"]]
    exec(code, module.__dict__)
    if "call" in job:
        call_function(job, module.__dict__, value)


def call_function(job: JobMessage, names: JobMessage, value: int) -> None:
    """Call the function and write what it returns to `value`, as JSON; the program ends there."""
    import json
    from types import CoroutineType

    name = job["call"]
    if name not in names and "Solution" in names:
        function = getattr(names["Solution"](), name)
    elif name in names:
        function = names[name]
    else:
        raise NameError(f"the program defines no function {name}")
    result = function(*json.loads(job["arguments"]))
    if isinstance(result, CoroutineType):
        result.close()  # or Python's last word would be that nobody awaited it
        raise TypeError(f"{name} is async; it must be a plain function")
    data = json.dumps(result).encode()
    while data:
        data = data[os.write(value, data) :]
    os._exit(0)


if __name__ == "__main__":
    main()
