"""Small requests between two processes, over a connection of their own.

A call of an actor takes 1 ms of CPU over both ends whatever it does, a request here a tenth of it.
Whoever answers has a `RpcServer`; whoever asks opens a `RpcConnection` to the listener's
`Endpoint`, which it is told by an actor call. Both sides first prove that they have the endpoint's
secret, by an HMAC of what each of them has drawn: the secret itself is never sent, a greeting that
is heard is worth nothing to another, and neither side unpickles what comes from a stranger.

A frame is the number of its request and the bytes that follow: how many parts there are, the length
of each, and the parts. They are a pickle and the large buffers in it, each filled up to 8 bytes.
"""

import asyncio
import hmac
import itertools
import pickle
import secrets
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, unwrap_error
from streamrl.errors import ActorError, ConfigError, DeadlineError, StreamError

CONNECT_TIMEOUT_S = 10.0
"""Longest that a connection may take to be there and to be greeted, s."""
KEEPALIVE_TIMEOUT_S = 20
"""Longest that the other machine may say nothing before the connection is given up, s."""
_KEEPALIVE_PROBES = 4
_BUFFER_BYTES = 1 << 20
_ALIGNMENT = 8
_SECRET_BYTES = _CHALLENGE_BYTES = _PROOF_BYTES = 32
_FRAME_HEADER = struct.Struct("<QQ")

RequestHandler = Callable[[Any], Awaitable[Any]]
_reader_tasks: set["asyncio.Task[str]"] = set()
"""Keeps what reads from open connections: an event loop itself holds its tasks only weakly."""


@dataclass(frozen=True)
class RpcEndpoint:
    """Where a listener can be reached, and what it lets in."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class RpcServer:
    """Answers what comes in on a port of `host`, each request in a task of its own.

    `answer` is given the request; the error it raises goes back to the caller. A request goes on
    if its caller is lost.
    """

    def __init__(self, host: str, answer: RequestHandler) -> None:
        self._host = host
        self._handler = answer
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._start_lock = asyncio.Lock()
        self._connection_tasks: set[asyncio.Task[None]] = set()
        self._request_tasks: set[asyncio.Task[Any]] = set()

    async def get_endpoint(self) -> RpcEndpoint:
        """Where to connect to; listens from the first call on."""
        async with self._start_lock:
            if self._server is None:
                self._server = await asyncio.start_server(
                    self._accept_connection, self._host, 0, limit=_BUFFER_BYTES
                )
        port = self._server.sockets[0].getsockname()[1]
        return RpcEndpoint(self._host, port, self._secret)

    def close(self) -> None:
        """Listen no more and hang up. What has been asked goes on."""
        if self._server is not None:
            self._server.close()
        for caller in self._connection_tasks:
            caller.cancel()

    def _accept_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        caller = asyncio.create_task(self._serve_connection(reader, writer))
        self._connection_tasks.add(caller)
        caller.add_done_callback(self._connection_tasks.discard)
        caller.add_done_callback(lambda _: writer.close())

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            _set_keepalive(writer)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                is_known = await _authenticate_client(reader, writer, self._secret)
            if not is_known:
                return
            while True:
                number, body = await _read_frame(reader)
                request = asyncio.create_task(self._handle_request(number, body))
                self._request_tasks.add(request)
                request.add_done_callback(partial(self._send_reply, writer, number))
        except (OSError, EOFError):
            return  # the caller is gone

    async def _handle_request(self, number: int, body: memoryview) -> bytes:
        return _encode_frame(number, (True, await self._handler(_decode_message(body))))

    def _send_reply(
        self, writer: asyncio.StreamWriter, number: int, request: "asyncio.Task[bytes]"
    ) -> None:
        self._request_tasks.discard(request)
        if request.cancelled():
            return
        error = request.exception()
        frame = (
            _encode_frame(number, (False, _to_sendable_error(error))) if error else request.result()
        )
        if not writer.is_closing():
            writer.write(frame)


class RpcConnection:
    """The asking end, on one event loop. Any number of calls may be under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._request_ids = itertools.count()
        self._pending_replies: dict[int, asyncio.Future[memoryview]] = {}
        self.is_open = True
        self._reader_task = asyncio.create_task(self._receive_replies(reader))
        self._reader_task.add_done_callback(self._fail_pending)
        _reader_tasks.add(self._reader_task)

    @classmethod
    async def open(cls, endpoint: RpcEndpoint) -> "RpcConnection":
        """Connect; raises ConnectionError where nobody listens, or somebody without the secret."""
        where = f"{endpoint.host}:{endpoint.port}"
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    endpoint.host, endpoint.port, limit=_BUFFER_BYTES
                )
                _set_keepalive(writer)
                await _authenticate_server(reader, writer, endpoint.secret)
            return cls(reader, writer)
        except TimeoutError:
            reason = f"{where} cannot be reached within {CONNECT_TIMEOUT_S:g} s"
        except EOFError:
            reason = f"{where} hung up when it was greeted"
        except OSError as error:
            reason = f"{where} cannot be reached ({error})"
        if writer is not None:
            writer.close()
        raise ConnectionError(reason)

    async def call(self, request: Any, what: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """What is answered to a request; `what` names it in errors.

        Raises ConnectionResetError if the connection is lost over it, DeadlineError after
        `timeout_s`, the other side's own StreamError or ConfigError, and ActorError for any other
        of its errors.
        """
        if not self.is_open:
            raise ConnectionResetError("the connection is lost")
        number = next(self._request_ids)
        frame = _encode_frame(number, request)
        self._pending_replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame)
            async with asyncio.timeout(timeout_s):
                body = await self._pending_replies[number]
        except TimeoutError:
            raise DeadlineError(f"{what}: no answer within {timeout_s:g} s") from None
        finally:
            del self._pending_replies[number]
        is_answer, value = _decode_message(body)
        if is_answer:
            return value
        if isinstance(value, str):
            raise ActorError(f"{what}: {value}")
        raise value

    def close(self) -> None:
        """Hang up; calls under way raise ConnectionResetError."""
        self._reader_task.cancel()

    async def _receive_replies(self, reader: asyncio.StreamReader) -> str:
        """Hand the answers out, until there will be none, and why."""
        try:
            while True:
                number, body = await _read_frame(reader)
                waiting = self._pending_replies.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(body)
        except EOFError:
            return "the other side closed it"
        except OSError as error:
            return str(error)

    def _fail_pending(self, reading: "asyncio.Task[str]") -> None:
        _reader_tasks.discard(reading)
        self.is_open = False
        self._writer.close()
        why = "it was closed here"
        if not reading.cancelled():
            why = str(reading.exception() or reading.result())
        for waiting in self._pending_replies.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError(f"the connection is lost ({why})"))


async def _authenticate_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> bool:
    """Tell whether the caller has the secret; one that has is shown that this side has it, too."""
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    writer.write(challenge)
    drawn = challenge + await reader.readexactly(_CHALLENGE_BYTES)
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _compute_proof(secret, b"caller", drawn)):
        return False
    writer.write(_compute_proof(secret, b"listener", drawn))
    return True


async def _authenticate_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> None:
    """Prove to have the secret; raises ConnectionError if the listener cannot prove it."""
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    drawn = await reader.readexactly(_CHALLENGE_BYTES) + challenge
    writer.write(challenge + _compute_proof(secret, b"caller", drawn))
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _compute_proof(secret, b"listener", drawn)):
        raise ConnectionError("it does not have the secret")


def _compute_proof(secret: bytes, side: bytes, drawn: bytes) -> bytes:
    return hmac.digest(secret, side + drawn, "sha256")


def _encode_frame(number: int, message: object) -> bytes:
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [text, *(buffer.raw() for buffer in buffers)]
    body: list[Any] = [struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts))]
    for part in parts:
        body += [part, bytes(-len(part) % _ALIGNMENT)]
    return b"".join([_FRAME_HEADER.pack(number, sum(map(len, body))), *body])


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, memoryview]:
    """The number of the next frame, and its body."""
    number, num_bytes = _FRAME_HEADER.unpack(await reader.readexactly(_FRAME_HEADER.size))
    return number, memoryview(await reader.readexactly(num_bytes))


def _decode_message(body: memoryview) -> Any:
    """The message of a frame; its arrays are views of the frame."""
    (count,) = struct.unpack_from("<Q", body)
    sizes = struct.unpack_from(f"<{count}Q", body, 8)
    start, parts = 8 + 8 * count, []
    for size in sizes:
        parts.append(body[start : start + size])
        start += size + -size % _ALIGNMENT
    return pickle.loads(parts[0], buffers=parts[1:])


def _to_sendable_error(error: BaseException) -> StreamError | ConfigError | str:
    """An error as it is, if the caller knows what to make of it; else as text."""
    cause = unwrap_error(error)
    if isinstance(cause, StreamError | ConfigError) and _is_picklable(cause):
        return cause
    lines = "".join(traceback.format_exception(error))
    return f"{type(cause).__name__}: {cause}\n{lines}"


def _is_picklable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _set_keepalive(writer: asyncio.StreamWriter) -> None:
    """A machine that is lost says nothing, not even that it is gone."""
    line = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": KEEPALIVE_TIMEOUT_S // _KEEPALIVE_PROBES,
        "TCP_KEEPALIVE": KEEPALIVE_TIMEOUT_S // _KEEPALIVE_PROBES,
        "TCP_KEEPINTVL": KEEPALIVE_TIMEOUT_S // _KEEPALIVE_PROBES,
        "TCP_KEEPCNT": _KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": KEEPALIVE_TIMEOUT_S * 1000,
    }
    for name, value in limits.items():
        if hasattr(socket, name):  # not every system has all of them
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
