"""Jail driver: receives a program, runs the tests in order and reports raw results.

For a session it keeps a Python interpreter instead, and runs code in it, call after call.

The driver is process 1 of a jail: signals from inside cannot reach it, and its exit kills all
processes of the jail. The host is the process of the sandbox, outside the jail; it sends the driver
as code and talks to the driver over the socket at stdin. The driver knows no expected outputs;
sandbox.py judges its reports on the host. It imports little because every jail starts its own
interpreter.

A test runs in these steps:
    reset_workspace -> fork -> exec_program (child) | wait_for_exit -> kill_all -> send_report
"""

import _ast  # the C module; importing `ast` is slow
import _signal as signal  # the C module; importing `signal` is slow
import builtins
import marshal
import os
import resource
import select
import struct
import sys
import time
from _sitebuiltins import Quitter

#: How a compilation or test ended: the first field of a report.
READY, EXITED, WALL_TIMEOUT, OUTPUT_LIMIT, FILE_LIMIT, COMPILE_FAILED = range(6)
#: Kind, exit code (negative: a signal), CPU seconds, bytes of output, bytes of stderr.
REPORT_FORMAT = struct.Struct("!BidII")
LENGTH_FORMAT = struct.Struct("!I")
HOST_FD = 200  # the host's socket, away from the descriptors of the program
_MAX_ERROR_BYTES = 4096
TICK_MS = 50
MAX_FDS = 1 << 12
_EXEC_STACK_BYTES = 64 << 20

#: Message of the host: first the program, then each test (see sandbox.py).
JobMessage = dict
_IS_JAILED = os.getpid() == 1


def main() -> None:
    """Receive a program, then run a test per message of the host until the socket closes.

    A first message with `end_bytes` starts a session instead (`run_session`).

    Returns only in the forked process of a Python program, which thereby exits like a script.
    """
    connect_to_host()
    program = receive_message()
    if "end_bytes" in program:
        run_session(program)
    if prepare_program(program):
        return
    compiled_files = read_compiled_files()
    while True:
        job = {**program, **receive_message()}
        reset_workspace(program, compiled_files)
        if run_job(job):
            return


def connect_to_host() -> None:
    """Move the host's socket away from stdin, close all other descriptors, and report READY."""
    os.dup2(0, HOST_FD)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, HOST_FD)
    os.closerange(HOST_FD + 1, MAX_FDS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores signals without a handler
    builtins.exit = Quitter("exit", "Ctrl-D")  # type: ignore[assignment]
    builtins.quit = Quitter("quit", "Ctrl-D")  # type: ignore[assignment]
    send_report(READY)


def receive_message() -> JobMessage:
    message: JobMessage = marshal.loads(read_block(HOST_FD))
    return message


def read_block(fd: int) -> bytes:
    """Read a block of bytes after its length; exit if the other side has closed `fd`."""
    (length,) = LENGTH_FORMAT.unpack(_read_exactly(fd, LENGTH_FORMAT.size))
    return _read_exactly(fd, length)


def _read_exactly(fd: int, size: int) -> bytes:
    chunks = []
    while size:
        chunk = os.read(fd, min(size, 1 << 20))
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def send_report(
    exit_kind: int,
    code: int = 0,
    cpu_s: float = 0.0,
    out: bytes = b"",
    err: bytes = b"",
) -> None:
    """Send the host the report of a compilation or test.

    exit_kind: EXITED or another constant of this module. code: exit code, negative: a signal.
        cpu_s: CPU time. out: stdout or return value. err: end of stderr.
    """
    data = REPORT_FORMAT.pack(exit_kind, code, cpu_s, len(out), len(err)) + out + err
    write_all(HOST_FD, data)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def prepare_program(program: JobMessage) -> bool:
    """Write the program's source file, compile it if its language needs that, and report.

    Returns True if this process is the forked child, as `run_job` does.
    """
    os.chdir(program["directory"])
    if os.listdir("."):  # `reset_workspace` deletes everything: the directory must be new
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
    """Return the compiled program, the files of program/ in the workspace: (path, mode, content).

    `reset_workspace` restores them before each test.
    """
    files = []
    for folder, _, names in os.walk("program"):
        for name in names:
            path = f"{folder}/{name}"
            with open(path, "rb") as file:
                files.append((path, os.fstat(file.fileno()).st_mode, file.read()))
    return files


def reset_workspace(program: JobMessage, compiled_files: list[tuple[str, int, bytes]]) -> None:
    """Delete the files of an earlier test and restore the program's compiled files."""
    os.chdir(program["directory"])
    # Not recursive: a program may nest directories beyond the limits of recursion and of paths.
    # Entries of a directory move to the top level, where the loop meets them again.
    pending = os.listdir(".")
    while pending:
        name = pending.pop()
        if os.path.islink(name) or not os.path.isdir(name):
            os.unlink(name)
            continue
        os.chmod(name, 0o700)
        for inner in os.listdir(name):
            moved = f".{time.monotonic_ns()}"
            if not os.path.islink(f"{name}/{inner}"):
                os.chmod(f"{name}/{inner}", 0o700)
            os.rename(f"{name}/{inner}", moved)
            pending.append(moved)
        os.rmdir(name)
    os.mkdir("program")
    os.mkdir("work")
    for path, mode, content in compiled_files:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, mode & 0o777)


def run_job(job: JobMessage) -> bool:
    """Run a compiler or a test in a forked child, enforce the limits and report to the host.

    Returns False in the driver. Returns True in the child after a Python program has ended: the
    child then returns from `main`, so that the interpreter exits like that of a script.
    """
    with open("stdin", "w", encoding="utf-8", errors="replace") as file:
        file.write(job["stdin"])
    if "call" in job:
        __import__("json")  # before the fork, so that no test pays for the import
    pipes = [os.pipe() for _ in range(4)]
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        exec_program(job, [write for _, write in pipes])
        return True
    for _, write in pipes:
        os.close(write)
    streams = [PipeReader(read, job["output_bytes"]) for read, _ in pipes]
    exit_kind = wait_for_exit(pid, streams, job, started + job["wall_s"])
    code, cpu_s = kill_all(pid)
    for stream in streams:
        stream.drain()
    out, err, value, note = streams
    if exit_kind == EXITED and any(stream.is_full for stream in streams):
        exit_kind = OUTPUT_LIMIT
    if note.data:
        exit_kind, err = COMPILE_FAILED, note
    result = value if "call" in job else out
    send_report(exit_kind, code, cpu_s, bytes(result.data), bytes(err.data[-_MAX_ERROR_BYTES:]))
    return False


class PipeReader:
    """Reads an output pipe of the tested program; full once over `limit` bytes have arrived."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.data = bytearray()
        self._limit = limit

    @property
    def is_full(self) -> bool:
        return len(self.data) > self._limit

    def read(self) -> bool:
        """Read the bytes that have arrived; return False at the end of the pipe."""
        chunk = os.read(self.fd, 1 << 16)
        self.data += chunk
        return bool(chunk)

    def drain(self) -> None:
        """Read the rest without blocking and close the pipe, after the program has exited."""
        os.set_blocking(self.fd, False)
        try:
            while not self.is_full and self.read():
                pass
        except BlockingIOError:  # without a jail, a surviving process may hold the pipe open
            pass
        os.close(self.fd)


def wait_for_exit(pid: int, streams: list[PipeReader], job: JobMessage, deadline: float) -> int:
    """Wait until the program, process `pid`, exits or exceeds a limit; read its pipes meanwhile.

    Returns EXITED, OUTPUT_LIMIT, WALL_TIMEOUT or FILE_LIMIT. deadline: on time.monotonic().
    """
    exit_fd = os.pidfd_open(pid)
    poller = select.poll()
    by_fd = {stream.fd: stream for stream in streams}
    for fd in (exit_fd, HOST_FD, *by_fd):
        poller.register(fd, select.POLLIN)
    exit_kind = None
    while exit_kind is None:
        for fd, _ in poller.poll(TICK_MS):
            if fd == HOST_FD:  # the host sends nothing during a run: it has closed the socket
                os._exit(0)
            if fd == exit_fd:
                exit_kind = EXITED
            elif not by_fd[fd].read():
                poller.unregister(fd)
        if exit_kind is None and any(stream.is_full for stream in streams):
            exit_kind = OUTPUT_LIMIT
        elif exit_kind is None and time.monotonic() > deadline:
            exit_kind = WALL_TIMEOUT
        elif exit_kind is None and _IS_JAILED and has_too_many_files(job):
            exit_kind = FILE_LIMIT
        reap_orphans(but=pid)
    os.close(exit_fd)
    return exit_kind


def has_too_many_files(job: JobMessage) -> bool:
    # Inodes of a tmpfs use kernel memory that belongs to no process.
    stats = os.statvfs(job["directory"])
    return stats.f_files - stats.f_ffree > job["files"]


def reap_orphans(but: int) -> None:
    """Reap exited orphans, which count toward the process limit; `but` is the program itself."""
    while True:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if child is None or child.si_pid == but:
            return
        os.waitpid(child.si_pid, 0)


def kill_all(pid: int) -> tuple[int, float]:
    """Kill the tested program, process `pid`, and everything it started in the jail.

    Returns the program's exit code and CPU seconds. This driver, the first process of the jail,
    survives.
    """
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
    """Turn the forked child into the tested program: set up descriptors and limits, then run it.

    A command replaces this process (exec); Python code runs in this process. pipes: write ends for
    stdout, stderr, return value and compile error.
    """
    out, err, value, note = pipes
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    first, second = sorted((value, note))
    os.closerange(3, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, MAX_FDS)
    if not _IS_JAILED:
        os.setsid()
    os.chdir("work")
    set_rlimits(job)
    if not job["run"]:
        run_python(job, value, note)
        return
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and exec inherits that
        signal.signal(number, signal.SIG_DFL)
    command = [part.replace("{dir}", job["directory"] + "/program") for part in job["run"]]
    os.closerange(first, second + 1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}".encode())
        os._exit(127)


def set_rlimits(job: JobMessage) -> None:
    limits = {
        # The hard limit kills. A second earlier the soft limit, set below, sends SIGXCPU, which
        # names the cause but can be ignored.
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
    for resource_id, limit in limits.items():
        _, hard = resource.getrlimit(resource_id)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource_id, (allowed, allowed))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(job["cpu_s"], hard), hard))


def run_python(job: JobMessage, value: int, note: int) -> None:
    """Run Python source as a script; for a function-call test, call the function afterwards.

    value: descriptor for the function's result. note: descriptor for a compile error, closed before
        the program runs so that the program cannot forge compile errors.
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


def call_function(job: JobMessage, names: JobMessage, result_fd: int) -> None:
    """Call the function that the job names, write its result as JSON, and exit the process.

    names: globals of the program; the function may also be a method of its class `Solution`.
    """
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
        result.close()  # avoids the warning "coroutine was never awaited" as last line of stderr
        raise TypeError(f"{name} is async; it must be a plain function")
    write_all(result_fd, json.dumps(result).encode())
    os._exit(0)


#: How a call of a session ended, besides EXITED and FILE_LIMIT: its code ran to the end, or raised.
RETURNED, RAISED = 16, 17
#: Number of a call, and whether its code raised.
_END_FORMAT = struct.Struct("!I?")
_CODE_FD, _END_FD = 3, 4
_MAX_FRAMES = 5
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_MOST_LEFT_OUT = (1 << 31) - 1


def run_session(settings: JobMessage) -> None:
    """Keep a Python interpreter, a forked child, and run the code of each message in it.

    Between calls all processes of the jail are stopped, so that an idle session uses no CPU time.

        host -- code --> driver -- code --> interpreter
             <- report -        <- ended -

    settings: the limits, and `end_bytes`: size of each end of a call's output that is kept.
    """
    os.chdir(settings["directory"])
    interpreter = Interpreter(settings)
    send_report(RETURNED)
    while True:
        interpreter.run_call(receive_message()["code"])


class Ignoring:
    """contextlib.suppress, whose module is slow to import."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, self._error)


class OutputEnds:
    """First and last bytes of an output; what lies between them is only counted.

    limit: size of each end, bytes. num_left_out: characters between the ends, as of UTF-8.
    """

    def __init__(self, limit: int) -> None:
        self.first, self.last = bytearray(), bytearray()
        self.num_left_out = 0
        self._limit = limit

    def append(self, data: bytes) -> None:
        room = self._limit - len(self.first)
        self.first += data[:room]
        self.last += data[room:]
        excess = len(self.last) - self._limit
        if excess > 0:
            self.num_left_out += len(self.last[:excess].translate(None, _CONTINUATION_BYTES))
            del self.last[:excess]


class Interpreter:
    """Forked child in which variables persist from call to call."""

    def __init__(self, settings: JobMessage) -> None:
        self._settings = settings
        self._num_calls = 0
        code_fd, self._code_fd = os.pipe()
        self._end_fd, end_fd = os.pipe()
        self._output_fd, output_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            os.dup2(code_fd, _CODE_FD)
            os.dup2(end_fd, _END_FD)
            for fd in (_CODE_FD, _END_FD):
                os.set_inheritable(fd, False)
            os.closerange(_END_FD + 1, MAX_FDS)
            set_rlimits(settings)
            serve_code()
        # The write ends of the other pipes stay open: so these pipes never end.
        os.close(code_fd)
        self._exit_fd = os.pidfd_open(self._pid)

    def run_call(self, code: str) -> None:
        """Run code and report its output to the host.

        The report has the ends of the output, and as its code the number of characters between
        them. After EXITED and FILE_LIMIT the host discards the jail.
        """
        self._num_calls += 1
        output = OutputEnds(self._settings["end_bytes"])
        signal_all(signal.SIGCONT)
        data = code.encode("utf-8", "surrogatepass")
        with Ignoring(BrokenPipeError):
            write_all(self._code_fd, LENGTH_FORMAT.pack(len(data)) + data)
        exit_kind = self._wait_for_end(output)
        # Stopped before the rest is read: another process might go on writing for ever.
        signal_all(signal.SIGSTOP)
        os.set_blocking(self._output_fd, False)
        with Ignoring(BlockingIOError):
            while chunk := os.read(self._output_fd, 1 << 16):
                output.append(chunk)
        os.set_blocking(self._output_fd, True)
        if exit_kind == EXITED:
            output.append(self._describe_exit())
        num_left_out = min(output.num_left_out, _MOST_LEFT_OUT)
        send_report(exit_kind, num_left_out, out=bytes(output.first), err=bytes(output.last))

    def _wait_for_end(self, output: OutputEnds) -> int:
        """Wait until the call ends; return RETURNED, RAISED, EXITED or FILE_LIMIT."""
        poller = select.poll()
        for fd in (self._exit_fd, self._end_fd, self._output_fd, HOST_FD):
            poller.register(fd, select.POLLIN)
        exit_kind = None
        while exit_kind is None:
            for fd, _ in poller.poll(TICK_MS):
                if fd == HOST_FD:  # the host sends nothing during a call: it has closed the socket
                    os._exit(0)
                exit_kind = exit_kind or self._handle_event(fd, output)
            if exit_kind != EXITED and has_too_many_files(self._settings):
                exit_kind = FILE_LIMIT
            reap_orphans(but=self._pid)
        return exit_kind

    def _handle_event(self, fd: int, output: OutputEnds) -> int | None:
        if fd == self._exit_fd:
            return EXITED
        if fd == self._output_fd:
            output.append(os.read(fd, 1 << 16))
            return None
        number, has_raised = _END_FORMAT.unpack(os.read(fd, _END_FORMAT.size))
        if number != self._num_calls:  # written by a forked process, after its call
            return None
        return RAISED if has_raised else RETURNED

    def _describe_exit(self) -> bytes:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if pid else 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"\nthe Python process {how}".encode()


def signal_all(number: int) -> None:
    """Send a signal to all processes of the jail but this one."""
    with Ignoring(ProcessLookupError):
        os.kill(-1, number)


def serve_code() -> None:
    """Run the code of each call in the same module; never return."""
    module = sys.modules["__main__"] = type(sys)("__main__")
    sources: dict[str, str] = {}
    interpreter_pid = os.getpid()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    while True:
        code = read_block(_CODE_FD).decode("utf-8", "surrogatepass")
        name = f"<call {len(sources) + 1}>"
        sources[name] = code
        has_raised = run_code(code, name, module.__dict__, sources)
        if os.getpid() != interpreter_pid:  # the code has forked and returned in the child
            os._exit(0)
        os.write(_END_FD, _END_FORMAT.pack(len(sources), has_raised))


def run_code(code: str, name: str, names: JobMessage, sources: dict[str, str]) -> bool:
    """Run code, print the value of a last expression, or the exception; return whether it raised.

    names: globals of the code. sources: code of all calls by name, for tracebacks.
    """
    try:
        tree = compile(code, name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, _ast.Module)
        ends_with_value = bool(tree.body) and isinstance(tree.body[-1], _ast.Expr)
        last = _ast.Interactive(body=[tree.body.pop()] if ends_with_value else [])
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if last.body:
            exec(compile(last, name, "single", dont_inherit=True), names)
    except BaseException as error:  # noqa: BLE001 - SystemExit included: the session goes on
        flush_output()
        write_all(1, format_error(error, sources).encode("utf-8", "backslashreplace"))
        return True
    flush_output()
    return False


def format_error(error: BaseException, sources: dict[str, str]) -> str:
    """Return the last lines of a traceback, without the frame of this driver."""
    import linecache
    import traceback

    for name, code in sources.items():
        lines = code.splitlines(keepends=True)
        linecache.cache[name] = (len(code), None, lines, name)
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, frames, limit=-_MAX_FRAMES))


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with Ignoring(Exception):  # the code may have closed or replaced it
            stream.flush()


if __name__ == "__main__":
    main()
