"""Handlers of test workers: normal and failing calls by name."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from streamrl.errors import ConfigError

LEAK_BYTES = 320 << 20


def serve(at_load: str) -> Callable[[tuple[str, Any]], Any]:
    """Return the handler, or fail while loading."""
    if at_load == "hang":
        hang(None)
    if at_load == "refuse":
        raise ConfigError("rewards.path=x.py: no such file")
    return lambda request: OPERATIONS[request[0]](request[1])


def serve_async(_: str) -> Callable[[tuple[str, Any]], Awaitable[Any]]:
    """Return an async handler; each request first waits 0.3 s, like a request to a server."""

    async def handler(request: tuple[str, Any]) -> Any:
        operation, argument = request
        await asyncio.sleep(0.3)
        return OPERATIONS[operation](argument)

    return handler


def square(number: int) -> int:
    return number * number


def pid(_: Any) -> int:
    return os.getpid()


def hash_text(text: str) -> int:
    return hash(text)


def work(number: int) -> int:
    time.sleep(0.05)
    return number


def hang(_: Any) -> None:
    while True:
        pass


def garble(data: bytes) -> None:
    """Write to every descriptor, including the pool's socket, and hang."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2:
                os.write(number, data)
        except OSError:
            continue
    hang(None)


def orphan(number: int) -> None:
    """Kill or stop the reaper, and continue."""
    os.kill(os.getppid(), number)
    time.sleep(600)


class Sly(str):
    """Text that executes code when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def sly(_: Any) -> str:
    return Sly("x")


def crash(_: Any) -> None:
    os._exit(7)


def leak(_: Any) -> None:
    """Exceed the memory limit."""
    hoard = b"x" * LEAK_BYTES
    time.sleep(600)
    assert hoard


def breed(path: str) -> None:
    """Start 50 orphaned sleepers, write their pids, and hang."""
    pids = []
    for _ in range(50):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writer, str(os.getpid()).encode())
                os.close(writer)
                time.sleep(600)
            os._exit(0)
        pids.append(os.read(reader, 20).decode())
    with open(path + ".part", "w") as file:
        file.write(" ".join(pids))
    os.rename(path + ".part", path)
    hang(None)


def fork(_: Any) -> str:
    """Fork, and return in both processes."""
    child = os.fork()
    if child == 0:
        return "the copy"
    time.sleep(0.3)
    return "itself"


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    operation.__name__: operation
    for operation in (
        *(square, pid, hash_text, work, fork),
        *(garble, orphan, sly, hang, crash, leak, breed),
    )
}
