"""`python -I -S stdio_supervisor.py COMMAND...`: run an MCP server and kill its whole process tree.

    host process -- SIGTERM --> supervisor (this file only)
                 -- stdin, stdout --- `- server
                                          `- processes of the server

As child subreaper the supervisor inherits every orphan of the server. It kills and reaps all
descendants when the server exits, on SIGTERM, and when the host dies.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main() -> None:
    """Start the server, wait for its exit or SIGTERM, kill all descendants, exit with its code."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # Blocked before the fork, so that none is missed; a mask survives exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    host = os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != host:
        return
    server = os.fork()
    if server == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        exec_server(sys.argv[1:])
    # Only the server holds them: its death closes them for the host.
    os.close(0)
    os.close(1)
    code = wait_for_end(server)
    kill_descendants()
    os._exit(code)


def exec_server(command: list[str]) -> None:
    """Replace this process by the server."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def wait_for_end(server: int) -> int:
    """Return the exit code of the server, or that of a killed one on SIGTERM; reap orphans."""
    received = signal.SIGCHLD
    while received == signal.SIGCHLD:
        received = signal.Signals(signal.sigwait(SIGNALS))
        # Also on SIGTERM: the server may have exited before, of which the code tells.
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                if pid == server:
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
    return 128 + signal.SIGKILL


def kill_descendants() -> None:
    """Kill and reap the children of this process until none is left.

    Their own children become children of this process.
    """
    while True:
        for pid in list_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def list_children() -> list[int]:
    """Return the pids of the children of this process."""
    children, this_pid = [], str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The command name may contain spaces and parentheses: parse after the last one.
                if file.read().rpartition(b")")[2].split()[1].decode() == this_pid:
                    children.append(int(name))
    return children


if __name__ == "__main__":
    main()
