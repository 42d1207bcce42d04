"""Entry point of a Ray worker: fork it from the fork server, or start it the way Ray does.

Ray runs this file instead of its own `setup_worker.py`, once per worker, so it imports only the
standard library.
"""

import importlib.util
import json
import os
import socket
import struct
import sys
from pathlib import Path

SOCKETS_VARIABLE = "STREAMRL_FORK_SERVER"
"""Environment variable: prefix of the fork server's sockets; unset without a fork server."""
LEVEL_VARIABLE = "STREAMRL_FORK_LEVEL"
"""Environment variable in a worker's runtime environment: fork level of the worker."""
ANSWER_TIMEOUT_S = 45.0
"""Longest wait for the fork server. Ray gives a worker 60 s, and its own start needs the rest."""
STANDARD_STREAMS = (0, 1, 2)
SETUP_WORKER_OPTIONS = ("--language", "--serialized-runtime-env-context")
"""Options for Ray's setup script, on the same command line as those for the worker."""


def make_socket_address(sockets: str, level: str) -> str:
    """Return the abstract Unix socket address of a fork level."""
    return f"\0{sockets}.{level}"


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", peer)[1] == os.getuid())


def main() -> None:
    """Fork a Ray worker from the fork server, or replace this process by Ray's own setup script."""
    arguments = sys.argv[1:]
    if not fork_worker(arguments):
        (ray,) = importlib.util.find_spec("ray").submodule_search_locations  # type: ignore[union-attr,misc]
        script = str(Path(ray, "_private", "workers", "setup_worker.py"))
        os.execv(sys.executable, [sys.executable, script, *arguments])


def fork_worker(arguments: list[str]) -> bool:
    """Request the fork of a Ray worker; return False if Ray's setup script must start the worker.

    arguments: command line of that script.
    """
    options = {name: value for name, _, value in (w.partition("=") for w in arguments)}
    command = [word for word in arguments if word.partition("=")[0] not in SETUP_WORKER_OPTIONS]
    context = json.loads(options.get("--serialized-runtime-env-context") or "{}")
    variables = context.get("env_vars") or {}
    is_plain = (
        options.get("--language", "PYTHON") == "PYTHON"
        and context.get("py_executable", sys.executable) == sys.executable
        and not context.get("command_prefix")
        and not context.get("override_worker_entrypoint")
        and command[0].endswith(".py")
    )
    sockets = os.environ.get(SOCKETS_VARIABLE)
    if sockets is None or not is_plain:
        return False
    try:
        request = {"argv": command, "env": {**os.environ, **variables}, "cwd": os.getcwd()}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(make_socket_address(sockets, variables.get(LEVEL_VARIABLE, "base")))
            # Any user may bind the name of a dead level, and the request contains secrets.
            if not is_same_user(connection):
                return False
            socket.send_fds(connection, [b"f"], STANDARD_STREAMS)
            connection.sendall(json.dumps(request).encode() + b"\n")
            return connection.recv(1) == b"y"
    except OSError:
        return False


if __name__ == "__main__":
    main()
