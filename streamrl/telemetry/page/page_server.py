"""Server of the run page: loopback only, with a random token in the address."""

import json
import re
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from streamrl.errors import ConfigError
from streamrl.telemetry.page.page import FOLLOW_EVERY_S, RunPage

LOOPBACK = "127.0.0.1"
_STEP = re.compile("[0-9]{1,15}", re.ASCII)
HOST_NAMES = (LOOPBACK, "localhost")


class PageServer(ThreadingHTTPServer):
    """HTTP server of a page; `address` is what to open.

    port: 0 picks a free one. Construction raises ConfigError if the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, page: RunPage, *, port: int = 0) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(16)
        # Reading a run changes what its reader remembers: one request at a time.
        self.page_lock = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), PageHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}; leave it out to take a free one") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing for a connection that its browser closed, as by a reload."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop `serve_forever`, which another thread runs, and free the port."""
        self.shutdown()
        self.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """Answers a request that has the token."""

    server: PageServer
    server_version = "streamrl"
    sys_version = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not self._is_allowed(query.get("token", "")):
            self._send("open the address that streamrl view prints", HTTPStatus.FORBIDDEN)
            return
        try:
            with self.server.page_lock:
                self._answer(parts.path, query)
        except ConfigError as error:
            self._send(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)

    def _is_allowed(self, token: str) -> bool:
        # A page of another site, whose name resolves to this machine, names its own host.
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        is_token = secrets.compare_digest(token.encode(), self.server.token.encode())
        return host in HOST_NAMES and is_token

    def _answer(self, path: str, query: dict[str, str]) -> None:
        page = self.server.page
        match path:
            case "/":
                self._send(page.render(is_served=True), content_type="text/html")
            case "/data":
                state = page.compute_state()
                if query.get("state") == state:
                    self._send("", HTTPStatus.NO_CONTENT)
                else:
                    data = page.describe(follow_every_s=FOLLOW_EVERY_S)
                    self._send_json({**data, "state": state})
            case "/rollouts" if _STEP.fullmatch(query.get("step", "")):
                groups = page.describe_rollouts(query.get("run", ""), int(query["step"]))
                self._send_json(groups or {"groups": []})
            case _:
                self._send("no such page", HTTPStatus.NOT_FOUND)

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value, allow_nan=False), content_type="application/json")

    def _send(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, *, content_type: str = "text/plain"
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal shows the address."""
