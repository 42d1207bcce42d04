"""Main loop of a worker process: loads a handler and serves requests.

A sync handler runs in the main thread, so it may use signals, and serves one request at a time. An
async handler serves concurrent requests, which the pool can cancel individually.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NoReturn

from streamrl.errors import ConfigError

RequestHandler = Callable[[Any], Any]
HEADER = struct.Struct("!Q")
"""Length of the pickle that follows. The pool reads pickles of workers with a class list."""
LOAD_FAILED, READY, RESULT, FAILED = "refused", "ready", "answer", "failed"
REQUEST, CANCEL = "ask", "end"


def pack_message(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def read_message(reader: BinaryIO) -> Any:
    """Read and unpickle the pool's next message; raise EOFError at the end of the stream."""
    header = reader.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(reader.read(HEADER.unpack(header)[0]))


def run_worker(channel: socket.socket, target: str) -> NoReturn:
    """Load a handler and serve requests from `channel`, the socket to the pool, until it closes.

    target: "module:function"; called with the first message, this function returns the handler.
    """
    _detach_stdio()
    reader = channel.makefile("rb")
    handler: RequestHandler | None = None
    answer: tuple[str, int | str, bool]
    try:
        module, _, name = target.partition(":")
        handler = vars(importlib.import_module(module))[name](read_message(reader))
        answer = (READY, os.getpid(), is_async_handler(handler))
    except ConfigError as error:
        answer = (LOAD_FAILED, str(error), False)
    except EOFError:
        os._exit(0)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        channel.sendall(pack_message(answer))
        if handler is not None:
            serve = _serve_async if is_async_handler(handler) else _serve_sync
            serve(handler, channel, reader)
    # os._exit does not wait for threads that user code left behind.
    os._exit(0)


def _detach_stdio() -> None:
    """Give this process an empty stdin and redirect its stdout to stderr."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdin = open(0)  # noqa: SIM115 - stays open as long as the process


def is_async_handler(handler: RequestHandler) -> bool:
    call = type(handler).__call__
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def _serve_sync(handler: RequestHandler, channel: socket.socket, reader: BinaryIO) -> None:
    """Handle requests in the main thread, each after the end of the previous request."""
    worker_pid = os.getpid()
    while True:
        kind, call_id, request = read_message(reader)
        if kind == REQUEST:
            message = _handle_request(call_id, handler, request)
            exit_if_forked(worker_pid)
            channel.sendall(message)


def exit_if_forked(worker_pid: int) -> None:
    """Exit if this process is a fork of the worker: user code may fork and return in the child."""
    if os.getpid() != worker_pid:
        os._exit(0)


def _serve_async(handler: RequestHandler, channel: socket.socket, reader: BinaryIO) -> None:
    """Handle requests concurrently on an event loop; cancel a request if the pool demands so."""
    worker_pid = os.getpid()
    # Not the loop's default executor, which user code may fill with calls that block.
    reading_thread, sending_thread = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def handle_request(call_id: int, request: Any) -> None:
        try:
            result = await handler(request)
        # Includes CancelledError: the response tells the pool that the call has ended.
        except BaseException as error:  # noqa: BLE001 - every error is reported
            message = _pack_failure(call_id, error)
        else:
            message = _handle_request(call_id, lambda _: result, None)
        exit_if_forked(worker_pid)
        # Not awaited: a request cancelled now must still be answered.
        sending_thread.submit(channel.sendall, message)

    async def serve() -> None:
        tasks: dict[int, asyncio.Task[None]] = {}
        loop = asyncio.get_running_loop()
        while True:
            kind, call_id, request = await loop.run_in_executor(
                reading_thread, read_message, reader
            )
            if kind == REQUEST:
                tasks[call_id] = asyncio.create_task(
                    handle_request(call_id, request), name=str(call_id)
                )
                tasks[call_id].add_done_callback(lambda task: tasks.pop(int(task.get_name())))
            elif call_id in tasks:
                tasks[call_id].cancel()

    asyncio.run(serve())


def _handle_request(call_id: int, handler: RequestHandler, request: Any) -> bytes:
    try:
        return pack_message((RESULT, call_id, handler(request)))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - reported
        return _pack_failure(call_id, error)


def _pack_failure(call_id: int, error: BaseException) -> bytes:
    return pack_message((FAILED, call_id, str(error) or type(error).__name__))
