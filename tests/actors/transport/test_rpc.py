"""RPC with client and server in this process: messages, errors, authentication, lost peers."""

import asyncio
import contextlib
import pickle
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.actors.transport import rpc
from streamrl.actors.transport.rpc import RpcConnection, RpcEndpoint, RpcServer
from streamrl.errors import ActorError, ConfigError, DeadlineError, RewardError, StreamError

HOST = "127.0.0.1"


async def echo(request: Any) -> Any:
    return request


@contextlib.asynccontextmanager
async def listening(handler: Any) -> AsyncIterator[RpcEndpoint]:
    server: Any = RpcServer(HOST, handler)
    endpoint = await server.get_endpoint()
    try:
        yield endpoint
    finally:
        server._server.close()


@contextlib.asynccontextmanager
async def connected(handler: Any = echo) -> AsyncIterator[RpcConnection]:
    async with listening(handler) as endpoint:
        connection = await RpcConnection.open(endpoint)
        try:
            yield connection
        finally:
            connection._writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(accept: Any) -> AsyncIterator[RpcEndpoint]:
    """Serve connections by a function of the test, in place of an RpcServer."""
    server = await asyncio.start_server(accept, HOST, 0)
    try:
        yield RpcEndpoint(HOST, server.sockets[0].getsockname()[1], bytes(32))
    finally:
        server.close()


@pytest.mark.parametrize("size", [0, 1, 5000, 20 << 20])
async def test_messages_of_any_size_arrive_complete(size: int):
    array = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    async with connected() as connection:
        reply = await connection.call({"a": array, "b": [array.tobytes(), "c"]}, "echo")
    assert reply["a"].tobytes() == reply["b"][0] == array.tobytes()
    assert reply["b"][1] == "c"


async def test_a_cancelled_call_continues_on_the_server_and_delays_no_other_call():
    gate, ended = asyncio.Event(), asyncio.Event()

    async def work(request: str) -> str:
        if request == "slow":
            await gate.wait()
            ended.set()
        return request

    async with connected(work) as connection:
        with pytest.raises(DeadlineError, match=re.escape("shard-0.put: no answer within 0.05")):
            await connection.call("slow", "shard-0.put", 0.05)
        slow = asyncio.create_task(connection.call("slow", "shard-0.put"))
        await asyncio.sleep(0)
        slow.cancel()
        assert await connection.call("fast", "shard-0.put") == "fast"
        gate.set()
        await asyncio.wait_for(ended.wait(), 5.0)
        assert await connection.call("after", "shard-0.put") == "after"


class Unreadable:
    """Object that raises when unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class SecretiveError(StreamError):
    """Error that can be pickled but not unpickled."""

    def __init__(self, name: str, secret: str) -> None:
        super().__init__(f"{name} failed")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("model.path=x: no"), ConfigError, "model.path=x: no"),
        (RewardError("no verdict"), RewardError, "no verdict"),
        (KeyError("lengths"), ActorError, r"shard-0\.put: KeyError: 'lengths'\n[^$]*in fail"),
        (SecretiveError("a", "b"), ActorError, r"shard-0\.put: SecretiveError: a failed"),
    ],
)
async def test_only_streamrl_errors_that_can_be_unpickled_arrive_with_their_type(
    error: Exception, kind: type[Exception], text: str
):
    async def fail(_: Any) -> None:
        raise ExceptionGroup("tasks", [error])

    async with connected(fail) as connection:
        with pytest.raises(kind, match=f"^{text}"):
            await connection.call("x", "shard-0.put", 5.0)


async def test_an_unpicklable_request_or_reply_is_an_error_of_the_call():
    async def reply_unpicklable(request: Any) -> Any:
        return (lambda: 0) if request == "unsendable" else request

    async with connected(reply_unpicklable) as connection:
        with pytest.raises(ActorError, match=r"shard-0\.take: ValueError: invalid literal"):
            await connection.call(Unreadable(), "shard-0.take")
        with pytest.raises(ActorError, match=r"shard-0\.take: .*[Pp]ickle"):
            await connection.call("unsendable", "shard-0.take")
        with pytest.raises((AttributeError, pickle.PicklingError)):
            await connection.call(lambda: 0, "shard-0.take")
        assert await connection.call("fine", "shard-0.take") == "fine"


async def test_clients_and_servers_without_the_secret_are_refused():
    answered = []

    async def answer(request: Any) -> Any:
        answered.append(request)

    async with listening(answer) as endpoint:
        assert str(endpoint.secret) not in repr(endpoint)
        with pytest.raises(ConnectionError, match="closed the connection during authentication"):
            await RpcConnection.open(RpcEndpoint(endpoint.host, endpoint.port, bytes(32)))
        # A client that sends a message instead of a proof.
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(rpc._encode_frame(0, "x") + bytes(64))
        assert len(await asyncio.wait_for(reader.read(), 5.0)) == rpc._CHALLENGE_BYTES
        writer.close()
    assert not answered


MARKS: list[str] = []


def leave_mark() -> None:
    MARKS.append("read")


class Marked:
    """Object that leaves a mark when unpickled."""

    def __reduce__(self) -> Any:
        return leave_mark, ()


async def test_messages_from_unauthenticated_peers_are_never_unpickled():
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(64) + rpc._encode_frame(0, (True, Marked())))
        await reader.read()

    async with serving(pretend) as endpoint:
        with pytest.raises(ConnectionError, match="does not have the secret"):
            await RpcConnection.open(endpoint)
    async with listening(echo) as endpoint:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(bytes(64) + rpc._encode_frame(0, Marked()))
        await asyncio.sleep(0.05)
        writer.close()
    assert MARKS == []
    pickle.loads(rpc._encode_frame(0, Marked())[rpc._FRAME_HEADER.size :])
    assert MARKS == ["read"], "an unpickled message would have left its mark"


async def test_a_recorded_handshake_cannot_be_replayed_and_hides_the_secret():
    answered, recorded = [], []

    async def answer(request: Any) -> Any:
        answered.append(request)

    async with listening(answer) as endpoint:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Proxy the connection and record the client's bytes."""
            upstream = await asyncio.open_connection(endpoint.host, endpoint.port)
            writer.write(await upstream[0].readexactly(rpc._CHALLENGE_BYTES))
            recorded.append(await reader.readexactly(64))
            upstream[1].write(recorded[0])
            writer.write(await upstream[0].readexactly(rpc._PROOF_BYTES))
            recorded.append(await reader.readexactly(16))

        async with serving(relay) as relayed:
            connection = await RpcConnection.open(replace(relayed, secret=endpoint.secret))
            call = asyncio.create_task(connection.call("x", "shard-0.put", 5.0))
            while len(recorded) < 2:
                await asyncio.sleep(0.001)
            call.cancel()
        assert endpoint.secret not in b"".join(recorded)
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(recorded[0] + rpc._encode_frame(0, "again"))
        assert len(await asyncio.wait_for(reader.read(), 5.0)) == rpc._CHALLENGE_BYTES
        writer.close()
        connection._writer.transport.abort()
    assert not answered


async def test_calls_in_flight_fail_when_the_server_is_gone():
    writers: list[asyncio.StreamWriter] = []

    async def read_calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await rpc._authenticate_client(reader, writer, bytes(32))
        writers.append(writer)
        await reader.readexactly(40)

    async with serving(read_calls) as endpoint:
        connection = await RpcConnection.open(endpoint)
        calls = [asyncio.create_task(connection.call(i, "shard-0.take")) for i in range(3)]
        while not writers:
            await asyncio.sleep(0.001)
        writers[0].transport.abort()
        for call in [*calls, connection.call(3, "shard-0.take")]:
            with pytest.raises(ConnectionError, match="the connection is lost"):
                await asyncio.wait_for(call, 5.0)


async def test_a_peer_that_stops_reading_is_a_lost_connection_not_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rpc, "KEEPALIVE_TIMEOUT_S", 4)
    gone = asyncio.Event()

    async def stop_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await rpc._authenticate_client(reader, writer, bytes(32))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await gone.wait()
        writer.close()

    async with serving(stop_reading) as endpoint:
        connection = await RpcConnection.open(endpoint)
        with pytest.raises(ConnectionResetError, match=r"the connection is lost .*timed out"):
            await connection.call(bytes(64 << 20), "shard-0.put", 60.0)
        gone.set()
