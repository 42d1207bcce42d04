"""A worker's own loop: it loads a handler, then answers one request after another.

A plain handler is called in the main thread, so it may use signals, and gets one request at a
time. An async one gets as many at once as the pool sends, and each may be cancelled by itself.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from streamrl.errors import ConfigError
from streamrl.process_pool.framing import pack_message, read_message

RequestHandler = Callable[[Any], Any]
LOAD_FAILED, READY, RESULT, FAILED, REQUEST, CANCEL = (
    "refused",
    "ready",
    "answer",
    "failed",
    "ask",
    "end",
)


def run_worker(channel: socket.socket, target: str) -> NoReturn:
    """Load what `target`, "module:function", makes of the first message; then serve."""
    _detach_stdio()
    reader = channel.makefile("rb")
    try:
        module, _, name = target.partition(":")
        handler: RequestHandler = vars(importlib.import_module(module))[name](
            read_message(reader.read)
        )
        channel.sendall(pack_message((READY, os.getpid(), is_async_handler(handler))))
    except ConfigError as error:
        channel.sendall(pack_message((LOAD_FAILED, str(error), False)))
        os._exit(0)
    except EOFError:
        os._exit(0)
    serve = _serve_async if is_async_handler(handler) else _serve_sync
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(handler, channel, reader)
    # Threads that a user's function left behind are not waited for.
    os._exit(0)


def _detach_stdio() -> None:
    """Nothing to read, and what is printed goes where errors go."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdin = open(0)  # noqa: SIM115 - for as long as the process lives


def is_async_handler(handler: RequestHandler) -> bool:
    """Whether a call gives an awaitable."""
    call = type(handler).__call__
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def _serve_sync(handler: RequestHandler, channel: socket.socket, reader: BinaryIO) -> None:
    own = os.getpid()
    while True:
        kind, number, request = read_message(reader.read)
        if kind == REQUEST:
            message = _handle_request(number, handler, request)
            _exit_if_forked(own)
            channel.sendall(message)


def _exit_if_forked(own: int) -> None:
    """A user's function may have forked, and have come back in the child too."""
    if os.getpid() != own:
        os._exit(0)


def _serve_async(handler: RequestHandler, channel: socket.socket, reader: BinaryIO) -> None:
    sending, own = asyncio.Lock(), os.getpid()

    async def answer(number: int, request: Any) -> None:
        try:
            result = await handler(request)
        # CancelledError too: of what was cancelled nobody waits for the reply.
        except BaseException as error:  # noqa: BLE001 - reported, whatever it is
            message = _pack_failure(number, error)
        else:
            message = _handle_request(number, lambda _: result, None)
        _exit_if_forked(own)
        async with sending:
            await asyncio.to_thread(channel.sendall, message)

    async def serve() -> None:
        tasks: dict[int, asyncio.Task[None]] = {}
        while True:
            kind, number, request = await asyncio.to_thread(read_message, reader.read)
            if kind == REQUEST:
                tasks[number] = asyncio.create_task(answer(number, request), name=str(number))
                tasks[number].add_done_callback(lambda task: tasks.pop(int(task.get_name())))
            elif number in tasks:
                tasks[number].cancel()

    asyncio.run(serve())


def _handle_request(number: int, handler: RequestHandler, request: Any) -> bytes:
    try:
        return pack_message((RESULT, number, handler(request)))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - reported
        return _pack_failure(number, error)


def _pack_failure(number: int, error: BaseException) -> bytes:
    return pack_message((FAILED, number, str(error) or type(error).__name__))
