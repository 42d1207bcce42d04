"""Start Ray workers by forking processes that have imported their libraries already.

Imports of torch, transformers, DeepSpeed and vLLM take longer than all else in the start of a run.
`start_fork_server` starts a process that imports what all workers need and forks itself into one
process per level of LEVELS. They import the rest side by side while the command reads its config
and its prompts and starts Ray. Each listens on a Unix socket. Ray starts a worker through
`launch_worker.py`, which asks the level that the worker's runtime environment names to fork.

Only a process with one thread and without a CUDA context is forked, and only one that has not yet
drawn an id from Ray: its forks would draw the same ids, for tasks and objects alike. A level that
cannot be forked, could not import its modules, or imported them under another environment than the
worker asks for, refuses, and the worker starts as Ray starts it. A level that is killed takes its
workers along, since none may outlive the command; those that Ray starts again start as Ray does it.
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
from types import ModuleType
from typing import Any, NoReturn

from streamrl.actors.launch.launch_worker import (
    LEVEL_VARIABLE,
    SOCKETS_VARIABLE,
    STANDARD_STREAMS,
    is_same_user,
    make_socket_address,
)
from streamrl.engines.vllm.environment import make_vllm_env

FORK_VARIABLE = "STREAMRL_FORK_WORKERS"
"""Set to 0, it has workers start as Ray starts them."""
SINGLE_THREAD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries of numbers start no threads if this holds while they are imported."""
SERVER_CODE = f"from {__name__} import main; main()"
LAUNCHER_PATH = Path(__file__).with_name("launch_worker.py")
PR_SET_PDEATHSIG = 1
BACKLOG = 64
MAX_OPEN_FILES = 1 << 16
"""Files that a worker may have open, if the machine lets it."""
REQUEST_TIMEOUT_S = 10.0
"""Longest that a launcher may take to write its request, s."""
TOKEN_AUTH_ENV = {"RAY_AUTH_MODE": "token"}
"""Ray reads this when it is imported; the token itself comes with the environment of a worker."""
STAGE_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""For the libraries of models and tokenizers, which coordinator and shards do not use."""


@dataclass(frozen=True)
class ForkLevel:
    """Modules that one process imports, on top of its parent's.

    `env` is what they read at import: a worker that asks for other values is refused. `absent` are
    optional modules that they do without during the import, `empty` ones that a run has no use for.
    """

    name: str
    parent: str
    modules: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


UNUSED_MODULES = ("scipy",)
"""transformers matches boxes with it, vLLM resamples audio; both ask whether it is there, at their
first import, and it takes 0.7 s."""
BASE_LEVEL = ForkLevel(
    "base",
    "",
    (
        "ray._private.workers.default_worker",
        *(
            f"streamrl.actors.{name}"
            for name in ("coordinator", "colocated", "scorer", "queue_shard")
        ),
        "transformers",
        "torch",
    ),
    absent=UNUSED_MODULES,
)
MODELS_LEVEL = ForkLevel(
    "models", "base", ("transformers.modeling_utils",), STAGE_ENV, absent=UNUSED_MODULES
)
TRAINER_LEVEL = ForkLevel(
    "trainer",
    "models",
    (
        "streamrl.engines.training.trainer",
        "streamrl.engines.training.deepspeed_backend",
        "deepspeed",
    ),
    {**STAGE_ENV, "DS_ACCELERATOR": "cpu"},
)
GENERATOR_LEVEL = ForkLevel(
    "generator",
    "models",
    (
        "streamrl.engines.generation.generator",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
    ),
    make_vllm_env("cpu"),
    absent=UNUSED_MODULES,
    # It patches Inductor, which takes 0.6 s to import and compiles nothing under generation_env.
    empty=("vllm.env_override",),
)
# DeepSpeed and vLLM ask for GPUs at import, after which a process cannot be forked.
HAS_GPU = Path("/dev/nvidiactl").exists()
FORK_LEVELS = (
    (BASE_LEVEL, MODELS_LEVEL)
    if HAS_GPU
    else (BASE_LEVEL, MODELS_LEVEL, TRAINER_LEVEL, GENERATOR_LEVEL)
)


@dataclass
class ForkServerState:
    """The process of the base level, None if it was not started; and why it could not be."""

    process: subprocess.Popen[bytes] | None = None
    refusal: str = ""


_server_state = ForkServerState()


def make_level_env(level: ForkLevel) -> dict[str, str]:
    """Return the entry of a worker's runtime environment that has it forked from `level`."""
    return {LEVEL_VARIABLE: (level if level in FORK_LEVELS else MODELS_LEVEL).name}


def start_fork_server(levels: Sequence[ForkLevel] = FORK_LEVELS) -> None:
    """Start the levels; Ray instances that this process starts from now on fork their workers.

    The first level is the base of the others. Does nothing if they run already. They end with the
    thread that calls this, and their workers with them. What went wrong is told by `refusal`.
    """
    if is_serving():
        return
    # One that this process inherited is that of a command around it.
    os.environ.pop(SOCKETS_VARIABLE, None)
    if os.environ.get(FORK_VARIABLE) == "0":
        return
    sockets = f"streamrl-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        listening = {level.name: _open_listener(sockets, level) for level in levels}
        files = {name: listener.fileno() for name, listener in listening.items()}
        request = json.dumps([os.getpid(), files, [asdict(level) for level in levels]])
        _server_state.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER_CODE, request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[*files.values()],
            # Ctrl-C in the terminal is for the command, which ends the run.
            start_new_session=True,
        )
    except OSError as error:
        _server_state.refusal = str(error)
        return
    for listener in listening.values():
        listener.close()
    os.environ[SOCKETS_VARIABLE] = sockets
    atexit.register(stop_fork_server)


def is_serving() -> bool:
    """Tell whether this process has started levels, and their base is alive."""
    return _server_state.process is not None and _server_state.process.poll() is None


def describe_refusal() -> str:
    """Return a line that says why there are no levels; empty if there are, or need not be."""
    reason = _server_state.refusal
    if _server_state.process is not None and not is_serving():
        reason = (
            f"the process that should fork them has ended with {_server_state.process.returncode}"
        )
    return f"workers import their libraries one by one, for seconds: {reason}" if reason else ""


def stop_fork_server() -> None:
    """End all levels and the workers that they forked."""
    if _server_state.process:
        os.environ.pop(SOCKETS_VARIABLE, None)
        _server_state.process.kill()
        _server_state.process.wait()
        _server_state.process = None


def _open_listener(sockets: str, level: ForkLevel) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    # In the abstract namespace: no file is left behind, however the command ends.
    listening.bind(make_socket_address(sockets, level.name))
    listening.listen(BACKLOG)
    return listening


def main() -> None:
    """Import and serve all levels, as `start_fork_server` asks for them."""
    parent, files, serialized = json.loads(sys.argv[1])
    levels = [ForkLevel(**level) for level in serialized]
    listening = {name: socket.socket(fileno=file) for name, file in files.items()}
    gc.disable()
    # As `ray.init` does it for the workers that it starts itself.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)), hard))
    # Ray reads these at import: a worker without a job takes that of its first task, and one whose
    # raylet is gone ends, as a local raylet does with the command.
    of_worker = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(parent)}
    os.environ.update({**STAGE_ENV, **TOKEN_AUTH_ENV, **of_worker})
    _serve_level(levels[0], levels, listening, parent)


def _serve_level(
    level: ForkLevel, levels: Sequence[ForkLevel], listening: dict[str, socket.socket], parent: int
) -> None:
    """Import a level's modules and serve it; a level that cannot import them ends."""
    _die_with_parent(parent)
    pid, needed = os.getpid(), {level.name}
    for other in levels:
        if other.parent in needed:
            needed.add(other.name)
    # A level that ends must not leave its socket open in others.
    for name in listening.keys() - needed:
        listening.pop(name).close()
    os.environ.update({**SINGLE_THREAD_ENV, **level.env})
    _import_modules(level)
    if not _is_forkable():
        return
    for child in levels:
        if child.parent == level.name and os.fork() == 0:
            return _serve_level(child, levels, listening, pid)
    for name in listening.keys() - {level.name}:
        listening.pop(name).close()
    # Nobody waits for workers; not before the imports, which may wait for commands.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if not _draws_unique_ids():
        return
    gc.freeze()
    while True:
        connection, _ = listening[level.name].accept()
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            _serve_launcher(level, connection, listening[level.name])


def _serve_launcher(level: ForkLevel, connection: socket.socket, listener: socket.socket) -> None:
    """Fork the worker that a launcher asks for, and answer whether it was."""
    connection.settimeout(REQUEST_TIMEOUT_S)
    if not is_same_user(connection):
        return
    request, files = _receive_request(connection)
    pid, is_forked = os.getpid(), False
    try:
        # A launcher that has given up has closed its end, and starts the worker itself.
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
    absent = [name for name in level.absent if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    sys.modules.update({name: ModuleType(name) for name in level.empty})
    try:
        for module in level.modules:
            importlib.import_module(module)
    finally:
        for name in absent:
            del sys.modules[name]


def _receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request and the files of the worker's standard streams."""
    _, files, _, _ = socket.recv_fds(connection, 1, len(STANDARD_STREAMS))
    with connection.makefile("rb") as lines:
        line = lines.readline()
    return json.loads(line), files


def _is_forkable() -> bool:
    """Tell whether a fork of this process is sound."""
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_initialized()
    return len(os.listdir("/proc/self/task")) == 1 and not has_cuda


def _draws_unique_ids() -> bool:
    """Tell whether forks of this process draw ids from Ray that no other fork draws.

    Ray's generator takes its seed at the first draw; `ray.remote` of a class is one.
    """
    if "ray" not in sys.modules:
        return True
    drawn = []
    for _ in range(2):
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, sys.modules["ray"].ObjectID.from_random().binary())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as answer:
            drawn.append(answer.read())
    return drawn[0] != drawn[1]


def _become_worker(request: Mapping[str, Any], files: list[int]) -> NoReturn:
    """Run Ray's worker in this process, with the launcher's environment and streams."""
    code: Any = 1
    try:
        os.setpgid(0, 0)  # Ray kills what a worker leaves behind by its process group
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, file in zip(STANDARD_STREAMS, files, strict=True):
            os.dup2(file, target)
            os.close(file)
        faulthandler.enable()  # an end by a signal leaves the stacks of all threads
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # all forks would draw the same
        gc.enable()
        sys.argv = request["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
