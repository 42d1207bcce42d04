import asyncio
import errno
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
import httpx
import pytest
import requests

from streamrl.user_code.service_gate import describe_failure, is_outage

LINGER_0 = struct.pack("ii", 1, 0)


def send_nothing(connection: socket.socket) -> None:
    connection.recv(65536)


def reset_connection(connection: socket.socket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)


def break_off(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")


def answer_status(status: int) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)

    return answer


@contextmanager
def serve(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that answers each connection thus, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_all() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        threading.Thread(target=serve_all, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def get_with_aiohttp(url: str) -> None:
    async def get() -> None:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            response.raise_for_status()
            await response.read()

    asyncio.run(get())


CLIENTS = {
    "requests": lambda url: requests.get(url, timeout=9).raise_for_status(),
    "httpx": lambda url: httpx.get(url, timeout=9, trust_env=False).raise_for_status(),
    "urllib": lambda url: urllib.request.urlopen(url, timeout=9).read(),
    "aiohttp": get_with_aiohttp,
}
ANSWERS = {
    "ends": (send_nothing, True),
    "resets": (reset_connection, True),
    "breaks off": (break_off, True),
    "429": (answer_status(429), True),
    "503": (answer_status(503), True),
    "404": (answer_status(404), False),
    "500": (answer_status(500), False),
}


def catch_error(get: Callable[[str], object], url: str) -> Exception:
    with pytest.raises(Exception) as caught:
        get(url)
    return caught.value


@pytest.mark.parametrize("client", CLIENTS)
def test_errors_of_every_client_show_whether_a_service_is_out(
    client: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("no_proxy", "*")
    get, verdicts = CLIENTS[client], {}
    for name, (answer, _) in ANSWERS.items():
        with serve(answer) as address:
            error = catch_error(get, f"http://{address}/")
        verdicts[name] = is_outage(error)
        reason = f"HTTP status {name}" if name.isdigit() else "nobody answers ("
        assert describe_failure(error).startswith(reason)
    assert verdicts == {name: expected for name, (_, expected) in ANSWERS.items()}
    with serve(send_nothing) as address:
        assert is_outage(catch_error(get, f"https://{address}/"))
    assert is_outage(catch_error(get, f"http://{address}/"))  # its server has ended
    assert is_outage(catch_error(get, "http://no-such-host.invalid/"))


UNREACHABLE = [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT]
NO_CONNECTION = [httpx.ConnectTimeout(""), requests.ConnectTimeout()]
OF_AN_ITEM = [BrokenPipeError(), TimeoutError(), httpx.ReadTimeout(""), FileNotFoundError(2, "")]


def test_an_unreachable_server_is_out_and_what_an_item_may_bring_about_is_no_outage():
    assert all(map(is_outage, [*(OSError(code, "") for code in UNREACHABLE), *NO_CONNECTION]))
    assert not any(map(is_outage, [*OF_AN_ITEM, KeyError()]))
