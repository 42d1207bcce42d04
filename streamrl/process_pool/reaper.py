"""`python reaper.py FD MODULE:FUNCTION PATHS`: a worker, and who ends all that it started.

The process splits in two before it loads anything. The worker runs what it is told; the keeper
runs nothing but this file. Whatever the worker starts and leaves behind comes to the keeper, which
ends it all once the worker ends, or once the other end of the socket is closed: because the pool
wants the worker gone, or because the pool's own process was killed.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_TIMEOUT_S = 5.0
"""Longest that the keeper goes on killing what forks faster than it is killed, s."""


def main() -> None:
    """Split; never returns."""
    channel, target = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    sys.path[:] = json.loads(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        # A keeper that something kills must not leave the worker to nobody.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)
        from streamrl.process_pool.worker import run_worker

        run_worker(channel, target)
    # Ctrl-C on a terminal reaches the whole group; the pool decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(0)
    status = wait_for_worker(channel, worker)
    channel.close()
    kill_descendants()
    os._exit(status)


def wait_for_worker(channel: socket.socket, worker: int) -> int:
    """Wait until the worker ends or is to end; its exit code, 128 + signal where one ended it."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    handle = os.pidfd_open(worker)
    poll.register(handle, select.POLLIN)
    ready = [number for number, _ in poll.poll()]
    if handle not in ready:
        os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """Kill everything below this process, orphans included, which came to it."""
    import psutil

    own, deadline = psutil.Process(), time.monotonic() + KILL_TIMEOUT_S
    while (left := own.children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
        time.sleep(0.001)


if __name__ == "__main__":
    main()
