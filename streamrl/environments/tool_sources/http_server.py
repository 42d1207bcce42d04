"""MCP server at an address, as a transport of the package `mcp`."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from streamrl.environments.tool_sources.stdio_server import MAX_MESSAGE_BYTES
from streamrl.errors import ConfigError
from streamrl.stream.service_gate import UNAVAILABLE_STATUSES, is_outage

if TYPE_CHECKING:
    import httpx2

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0
"""Longest silence of a server on an open connection; calls have deadlines of their own."""


class HttpServer:
    """Address of a server with streamable HTTP."""

    has_ended = False
    last_error = ""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = headers
        self._is_open, self._refusal = False, 0

    def kill(self) -> None:
        """Do nothing: the server is not ours."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        """Yield streams for messages from the server and to it."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # Without the environment: it may name a proxy, and .netrc has passwords for other hosts.
        client = httpx2.AsyncClient(
            headers=dict(self._headers),
            timeout=httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
            trust_env=False,
            event_hooks={"response": [self._check_response]},
        )
        async with (
            client,
            streamable_http_client(
                self._url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
            ) as streams,
        ):
            yield streams

    def mark_open(self) -> None:
        """End the session at every refused request from now on.

        Before, refusals belong to the negotiation of the protocol's version.
        """
        self._is_open = True

    def is_outage(self, error: BaseException) -> bool:
        """Return whether nobody answers, or nobody knows the session of an open connection."""
        return (
            is_outage(error)
            or self._refusal in UNAVAILABLE_STATUSES
            or (self._is_open and self._refusal == HTTPStatus.NOT_FOUND)
        )

    async def _check_response(self, response: "httpx2.Response") -> None:
        """End the session if the server refuses a request, as after it has lost the session.

        The package would report that like an error of the tool. Only with status 400 may a server
        that goes on answer a call.
        """
        import httpx2

        status = response.status_code
        is_json = response.headers.get("content-type", "").startswith("application/json")
        least = HTTPStatus.BAD_REQUEST if self._is_open else HTTPStatus.INTERNAL_SERVER_ERROR
        is_answer = status == HTTPStatus.BAD_REQUEST and is_json
        if response.request.method == "POST" and status >= least and not is_answer:
            self._refusal = status
            raise httpx2.HTTPStatusError(
                f"HTTP status {response.status_code}", request=response.request, response=response
            )


def read_headers(headers_env: Mapping[str, str], *, label: str) -> dict[str, str]:
    """Return HTTP headers with the values of environment variables. Raises ConfigError."""
    missing = [name for name in headers_env.values() if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{label}: headers_env: the environment variables {', '.join(missing)} are not set, or"
            " empty"
        )
    return {header: os.environ[name] for header, name in headers_env.items()}
