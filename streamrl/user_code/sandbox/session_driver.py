"""Session driver: keeps a Python interpreter in a jail and runs code in it, call after call.

Process 1 of the jail, like jail_driver.py, whose functions it uses; python_session.py is the host.
The interpreter is a forked child. Between calls all processes of the jail are stopped, so that an
idle session uses no CPU time.

    host -- code --> driver -- code --> interpreter
         <- report -        <- ended -
"""

import _ast  # the C module; importing `ast` is slow
import _signal as signal
import os
import select
import struct
import sys
from contextlib import suppress

from streamrl.user_code.sandbox.jail_driver import (
    EXITED,
    FILE_LIMIT,
    HOST_FD,
    LENGTH_FORMAT,
    MAX_FDS,
    TICK_MS,
    JobMessage,
    connect_to_host,
    has_too_many_files,
    read_block,
    reap_orphans,
    receive_message,
    send_report,
    set_rlimits,
    write_all,
)

#: How a call ended, besides EXITED and FILE_LIMIT: its code ran to the end, or raised.
RETURNED, RAISED = 16, 17
#: Number of a call, and whether its code raised.
_END_FORMAT = struct.Struct("!I?")
_CODE_FD, _END_FD = 3, 4
_MAX_FRAMES = 5
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_MOST_LEFT_OUT = (1 << 31) - 1


def main() -> None:
    """Start an interpreter, then run the code of each message of the host.

    The first message has the limits and `end_bytes`, each further one has `code`.
    """
    connect_to_host()
    settings = receive_message()
    os.chdir(settings["directory"])
    interpreter = Interpreter(settings)
    send_report(RETURNED)
    while True:
        interpreter.run_call(receive_message()["code"])


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
        with suppress(BrokenPipeError):
            write_all(self._code_fd, LENGTH_FORMAT.pack(len(data)) + data)
        exit_kind = self._wait_for_end(output)
        # Stopped before the rest is read: another process might go on writing for ever.
        signal_all(signal.SIGSTOP)
        os.set_blocking(self._output_fd, False)
        with suppress(BlockingIOError):
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
    with suppress(ProcessLookupError):
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
        with suppress(Exception):  # the code may have closed or replaced it
            stream.flush()


if __name__ == "__main__":
    main()
