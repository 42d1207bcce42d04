"""`python reaper.py FD MODULE:FUNCTION PATHS`: fork a worker and kill the whole process tree.

    pool -- socket -- reaper (this file only)
                        `- worker (user code)
                             `- processes of user code

The reaper forks before importing anything else. As child subreaper it inherits every orphan of the
worker. The reaper kills all descendants when the worker exits, and when the pool's end of the
socket closes: the pool retires the worker, or the pool's process was killed.
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
"""Limit against descendants that fork faster than they are killed."""


def main() -> None:
    """Fork the worker, wait for its exit, kill its descendants and exit with its exit code."""
    channel, target = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    sys.path[:] = json.loads(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    reaper_pid = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setsid()
        # Die with the reaper. The check of getppid covers a reaper that died before prctl.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != reaper_pid:
            os._exit(1)
        from streamrl.user_code.pool.worker import run_worker

        run_worker(channel, target)
    # Ctrl-C on a terminal signals the whole process group; only the pool ends the reaper.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(0)
    status = wait_for_worker(channel, worker)
    channel.close()
    kill_descendants()
    os._exit(status)


def wait_for_worker(channel: socket.socket, worker: int) -> int:
    """Return the exit code of pid `worker`, killed if the pool closes `channel`; 128 + signal."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    worker_fd = os.pidfd_open(worker)
    poll.register(worker_fd, select.POLLIN)
    ready_fds = [fd for fd, _ in poll.poll()]
    if worker_fd not in ready_fds:
        os.kill(worker, signal.SIGKILL)
    # Kill a fork bomb at once: the kernel lets no process of a group fork while it signals the
    # group. Before waitpid, as another group may have the worker's pid after it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill_descendants() -> None:
    """Kill all descendants, orphans of the worker included, within KILL_TIMEOUT_S."""
    import psutil

    this_process, deadline = psutil.Process(), time.monotonic() + KILL_TIMEOUT_S
    while (alive := this_process.children(recursive=True)) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
        time.sleep(0.001)


if __name__ == "__main__":
    main()
