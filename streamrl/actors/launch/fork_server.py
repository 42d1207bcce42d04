"""Fork Ray workers from processes that have already imported their libraries.

Importing torch, transformers, DeepSpeed and vLLM dominates the start of a run. `start_fork_server`
starts a process that imports the common modules and forks itself into a process per level of
FORK_LEVELS; the levels import the rest in parallel while the command reads its config and prompts
and starts Ray. Each level listens on a Unix socket:

    command -> base --fork--> models --fork--> trainer
                                     --fork--> generator
    raylet -> launch_worker.py -> socket of the level in the worker's runtime env -> fork

Forking is sound only in a process with a single thread and no CUDA context that has not drawn an id
from Ray: forks would repeat the same task and object ids. A level refuses if forking is unsound, if
its imports failed, or if the worker requests a different environment; Ray then starts the worker
normally. Killing a level kills its workers, since no worker may outlive the command; Ray restarts
those normally.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from streamrl.actors.launch.launch_worker import (
    LEVEL_VARIABLE,
    SOCKETS_VARIABLE,
    STANDARD_STREAMS,
    is_same_user,
    make_socket_address,
)
from streamrl.distributed.devices import has_gpu_context
from streamrl.engines.vllm.environment import make_vllm_env

FORK_VARIABLE = "STREAMRL_FORK_WORKERS"
"""Environment variable; 0 disables the fork server."""
SINGLE_THREAD_ENV = {
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow's allocator
}
"""Environment in which libraries start no threads at import."""
SERVER_CODE = f"from {__name__} import main; main()"
LAUNCHER_PATH = Path(__file__).with_name("launch_worker.py")
PR_SET_PDEATHSIG = 1
BACKLOG = 64
MAX_OPEN_FILES = 1 << 16
REQUEST_TIMEOUT_S = 10.0
TOKEN_AUTH_ENV = {"RAY_AUTH_MODE": "token"}
"""Environment that Ray reads at import; the token arrives with the worker's environment."""
STAGE_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of stages with models or tokenizers; coordinator and shards do not need it."""


@dataclass(frozen=True)
class ForkLevel:
    """Set of modules that a process of the fork server imports before it forks workers.

    parent: level from which this level is forked, with its modules.
    env: variables that the modules read at import; a worker with other values is refused.
    """

    name: str
    parent: str
    modules: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


BASE_LEVEL = ForkLevel(
    "base",
    "",
    (
        "ray._private.workers.default_worker",
        *(
            f"streamrl.actors.{name}"
            for name in ("coordination.coordinator", "generator", "queue_shard")
        ),
        "transformers",
        "torch",
    ),
)
MODELS_LEVEL = ForkLevel("models", "base", ("transformers.modeling_utils",), STAGE_ENV)
TRAINER_LEVEL = ForkLevel(
    "trainer",
    "models",
    ("streamrl.engines.training.model_trainer", "deepspeed"),
    {**STAGE_ENV, "DS_ACCELERATOR": "cpu"},
)
GENERATOR_LEVEL = ForkLevel(
    "generator",
    "models",
    (
        "streamrl.engines.generation.generation_engine",
        "streamrl.engines.vllm.engine",
        "vllm.v1.worker.cpu_worker",
    ),
    make_vllm_env("cpu"),
)
# With a GPU, DeepSpeed and vLLM touch CUDA at import, which rules out forking.
HAS_GPU = Path("/dev/nvidiactl").exists()
FORK_LEVELS = (
    (BASE_LEVEL, MODELS_LEVEL)
    if HAS_GPU
    else (BASE_LEVEL, MODELS_LEVEL, TRAINER_LEVEL, GENERATOR_LEVEL)
)


@dataclass
class ForkServerState:
    """Fork server of this process: the process of its base level, None if not started.

    refusal: reason of a failed start; empty without a failure.
    """

    process: subprocess.Popen[bytes] | None = None
    refusal: str = ""


_server_state = ForkServerState()


def make_level_env(level: ForkLevel) -> dict[str, str]:
    """Return the environment variable that makes Ray fork an actor's process from this level.

    Uses the models level if the fork server does not have the level, as on a machine with a GPU.
    """
    return {LEVEL_VARIABLE: (level if level in FORK_LEVELS else MODELS_LEVEL).name}


def start_fork_server(levels: Sequence[ForkLevel] = FORK_LEVELS) -> None:
    """Start the fork server, from which Ray instances started later by this process fork workers.

    levels: fork levels; the first is the ancestor of all others. Does nothing if a fork server is
    running or STREAMRL_FORK_WORKERS=0. The server and its workers die with the calling thread.
    `describe_refusal` reports a failed start.
    """
    if is_serving():
        return
    # An inherited value belongs to an enclosing command.
    os.environ.pop(SOCKETS_VARIABLE, None)
    if os.environ.get(FORK_VARIABLE) == "0":
        return
    sockets = f"streamrl-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        listeners = {level.name: socket.socket(socket.AF_UNIX) for level in levels}
        for name, listener in listeners.items():
            # The abstract namespace leaves no file behind, however the command ends.
            listener.bind(make_socket_address(sockets, name))
            listener.listen(BACKLOG)
        files = {name: listener.fileno() for name, listener in listeners.items()}
        request = json.dumps([os.getpid(), files, [asdict(level) for level in levels]])
        _server_state.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER_CODE, request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[*files.values()],
            # Keeps Ctrl-C in the terminal from reaching the workers; the command ends the run.
            start_new_session=True,
        )
    except OSError as error:
        _server_state.refusal = str(error)
        return
    for listener in listeners.values():
        listener.close()
    os.environ[SOCKETS_VARIABLE] = sockets
    atexit.register(stop_fork_server)


def is_serving() -> bool:
    """Return whether the fork server of this process is running."""
    return _server_state.process is not None and _server_state.process.poll() is None


def describe_refusal() -> str:
    """Return the reason why workers start without the fork server; empty if nothing failed."""
    reason = _server_state.refusal
    if _server_state.process is not None and not is_serving():
        reason = f"the fork server exited with code {_server_state.process.returncode}"
    return f"workers start slowly, each importing its own libraries: {reason}" if reason else ""


def start_script(level: ForkLevel, env: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    """Run a script with arguments, `words`, in a fork of a level, or as Ray starts workers.

    env: added to this process's. The process stands for the launcher; its output ends with the
    script's.
    """
    context = json.dumps({"env_vars": {**env, **make_level_env(level)}})
    options = ["--language=PYTHON", f"--serialized-runtime-env-context={context}"]
    return subprocess.Popen(
        [sys.executable, str(LAUNCHER_PATH), *words, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )


def stop_fork_server() -> None:
    """Kill the fork server and all workers forked from it."""
    if _server_state.process:
        os.environ.pop(SOCKETS_VARIABLE, None)
        _server_state.process.kill()
        _server_state.process.wait()
        _server_state.process = None


def main() -> None:
    """Import the modules of all fork levels, then fork a worker for each request.

    `start_fork_server` passes its arguments as JSON in sys.argv.
    """
    parent, files, serialized = json.loads(sys.argv[1])
    levels = [ForkLevel(**level) for level in serialized]
    listeners = {name: socket.socket(fileno=file) for name, file in files.items()}
    gc.disable()
    # Same limit that ray.init sets for its own workers.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)), hard))
    # Ray reads these at import. Job ffffffff: the worker takes the job of its first task. A worker
    # exits with its raylet, and a local raylet with the command, so the command's pid stands in.
    worker_env = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(parent)}
    os.environ.update({**STAGE_ENV, **TOKEN_AUTH_ENV, **worker_env})
    _serve_level(levels[0], levels, listeners, parent)


def _serve_level(
    level: ForkLevel, levels: Sequence[ForkLevel], listeners: dict[str, socket.socket], parent: int
) -> None:
    """Import a level's modules, fork its child levels, and fork workers on request.

    parent: pid of the process with which this level dies. Returns if the imports make forking
    unsound.
    """
    _die_with_parent(parent)
    pid, descendants = os.getpid(), {level.name}
    for other in levels:
        if other.parent in descendants:
            descendants.add(other.name)
    # A socket must close when its level dies, so no other level may hold a copy.
    for name in listeners.keys() - descendants:
        listeners.pop(name).close()
    os.environ.update({**SINGLE_THREAD_ENV, **level.env})
    _import_modules(level)
    if not _is_forkable():
        return
    for child in levels:
        if child.parent == level.name and os.fork() == 0:
            return _serve_level(child, levels, listeners, pid)
    for name in listeners.keys() - {level.name}:
        listeners.pop(name).close()
    # Reap forked workers automatically. After the imports, which may wait for subprocesses.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not _draws_unique_ids():
        return
    gc.freeze()
    while True:
        connection, _ = listeners[level.name].accept()
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            _serve_launcher(level, connection, listeners[level.name])


def _serve_launcher(level: ForkLevel, connection: socket.socket, listener: socket.socket) -> None:
    """Fork the worker that a `launch_worker` process requests; reply "y", or "n" without a fork.

    Does not fork if the launcher gave up, wants another environment than the level's, or forking is
    unsound. A process of another user gets no reply. listener: socket of the level, closed in the
    worker.
    """
    connection.settimeout(REQUEST_TIMEOUT_S)
    if not is_same_user(connection):
        return
    _, files, _, _ = socket.recv_fds(connection, 1, len(STANDARD_STREAMS))
    with connection.makefile("rb") as lines:
        request = json.loads(lines.readline())
    pid, is_forked = os.getpid(), False
    try:
        # A launcher that timed out has closed its end and starts the worker itself.
        has_closed = bool(select.select([connection], [], [], 0)[0])
        if not has_closed and request["env"].items() >= level.env.items() and _is_forkable():
            if os.fork() == 0:
                listener.close()
                connection.close()
                _die_with_parent(pid)
                _become_worker(request, files)
            is_forked = True
    finally:
        for file in files:
            os.close(file)
        connection.sendall(b"y" if is_forked else b"n")


def _import_modules(level: ForkLevel) -> None:
    for module in level.modules:
        importlib.import_module(module)


def _is_forkable() -> bool:
    """Return whether this process has a single thread and no CUDA context."""
    return len(os.listdir("/proc/self/task")) == 1 and not has_gpu_context()


def _draws_unique_ids() -> bool:
    """Return whether two forks of this process draw distinct Ray ids, by trying.

    Ray seeds its generator of task and object ids at the first draw, and a fork copies the seed.
    `ray.remote` of a class is such a draw.
    """
    if "ray" not in sys.modules:
        return True
    ids = []
    for _ in range(2):
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, sys.modules["ray"].ObjectID.from_random().binary())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            ids.append(pipe.read())
    return ids[0] != ids[1]


def _become_worker(request: Mapping[str, Any], files: list[int]) -> NoReturn:
    """Run Ray's worker in this forked process.

    Environment, directory and standard streams are those of `launch_worker`, which Ray started and
    which sent the request.
    """
    code: Any = 1
    try:
        os.setpgid(0, 0)  # Ray kills a worker's leftover children by process group
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, file in zip(STANDARD_STREAMS, files, strict=True):
            os.dup2(file, target)
            os.close(file)
        faulthandler.enable()  # write the stacks of all threads on a fatal signal
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # all forks share the parent's state
        gc.enable()
        sys.argv = request["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this fork server or forked Ray worker when process `parent` dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
