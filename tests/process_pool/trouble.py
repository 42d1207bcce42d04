"""Handlers of test workers: normal and failing calls by name."""

import asyncio
import os
import random
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
    return lambda request: DEEDS[request[0]](request[1])


def serve_async(_: str) -> Callable[[tuple[str, Any]], Awaitable[Any]]:
    """The same, many at once; all but trouble waits a while first, as for a server."""

    async def handler(request: tuple[str, Any]) -> Any:
        deed, argument = request
        await asyncio.sleep(0.3)
        return DEEDS[deed](argument)

    return handler


def square(number: int) -> int:
    return number * number


def pid(_: Any) -> int:
    return os.getpid()


def slow(number: int) -> int:
    time.sleep(random.uniform(0.0, 0.4))
    return number * number


def work(number: int) -> int:
    time.sleep(0.05)
    return number


def hang(_: Any) -> None:
    while True:
        pass


def dawdle(number: int) -> int:
    """Straggle, but finish."""
    time.sleep(2.0)
    return number


def garble(note: bytes) -> None:
    """Write to every descriptor, including the pool's socket, and hang."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2:
                os.write(number, note)
        except OSError:
            continue
    hang(None)


def orphan(number: int) -> None:
    """Kill or stop the reaper, and continue."""
    os.kill(os.getppid(), number)
    time.sleep(600)


class Sly(str):
    """A str that executes code when unpickled."""

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


def breed(note: str) -> None:
    """Start 50 orphaned sleepers, write their pids, and hang."""
    pids = []
    for _ in range(50):
        end, other = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(other, str(os.getpid()).encode())
                os.close(other)
                time.sleep(600)
            os._exit(0)
        pids.append(os.read(end, 20).decode())
    with open(note + ".part", "w") as file:
        file.write(" ".join(pids))
    os.rename(note + ".part", note)
    hang(None)


def fork(_: Any) -> str:
    """Return in two processes."""
    child = os.fork()
    if child == 0:
        return "the copy"
    time.sleep(0.3)
    return "itself"


DEEDS: dict[str, Callable[[Any], Any]] = {
    deed.__name__: deed
    for deed in (
        *(square, pid, slow, work, dawdle, fork),
        *(garble, orphan, sly, hang, crash, leak, breed),
    )
}
