"""Fake OpenAI-compatible server with scripted responses, over real HTTP."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

MODEL = "judge-1"


class ChatServer:
    """Responds with `reply(content)`: text, a whole response, or a number of seconds to hang.

    `refusals` come first, one per request: (status, headers, message). The server holds its
    responses until `hold_until` requests are in flight. `is_out`: status of a page for every
    request, or "hang" until it is None.
    """

    def __init__(self, reply: Callable[[str], Any]) -> None:
        self.reply = reply
        self.refusals: list[tuple[int, dict[str, str], str]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrival_times: list[float] = []
        self.hold_until = 0
        self.num_in_flight = self.max_in_flight = 0
        self.url, self.port = "", 0
        self.is_out: Any = None

    async def start(self) -> "ChatServer":
        app = web.Application(middlewares=[self._refuse_in_outage])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def close(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _refuse_in_outage(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.is_out and request.method == "POST":
            self.requests.append({})
        while self.is_out == "hang":
            await asyncio.sleep(0.01)
        if self.is_out:
            return web.Response(text="<html>", status=self.is_out)
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.arrival_times.append(time.monotonic())
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.refusals:
            status, headers, message = self.refusals.pop(0)
            error = {"error": {"message": message}}
            return web.json_response(error, status=status, headers=headers)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            async with asyncio.timeout(5):
                while self.max_in_flight < self.hold_until:
                    await asyncio.sleep(0.005)
            response = self.reply(body["messages"][0]["content"])
            if isinstance(response, float):
                await asyncio.sleep(response)
        finally:
            self.num_in_flight -= 1
        if isinstance(response, web.Response):
            return response
        choice = {"index": 0, "message": {"role": "assistant", "content": response}}
        return web.json_response({"choices": [{**choice, "finish_reason": "stop"}]})


@contextmanager
def serving(reply: Callable[[str], Any]) -> Iterator[ChatServer]:
    """Run the server in a thread, for a run in other processes."""
    loop, server = asyncio.new_event_loop(), ChatServer(reply)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield server
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
