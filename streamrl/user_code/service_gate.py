"""Gates before services outside the run, such as a judge's endpoint: one probe during an outage.

    caller --admit--> request        the service answers: requests pass side by side
                      |
               ServiceOutageError    nobody answers: all callers wait, one at a time tries again

An outage is never the fault of the item in hand. Its holder waits, with its lease, and the run ends
if the outage lasts too long (PipelineConfig.outage_s).
"""

import asyncio
import contextlib
import errno
import logging
import math
import operator
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from streamrl.errors import ServiceOutageError, StreamError, get_message

T = TypeVar("T")
_log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Pauses between two tries of a service that does not answer: the first, doubled up to the longest.
"""
MAX_OUTAGE_S = 14400.0
"""Longest outage that a caller waits for; PipelineConfig.outage_s ends a run earlier."""
PING_TIMEOUT_S = 10.0
MAX_LONE_FAILURES = 8
"""Failures of an item, while the service answered others in between or with an error of its own,
after which the item is the cause. Of a pair of servers behind one address, one may be out for long.
"""
TOO_MANY_REQUESTS = 429
UNAVAILABLE_STATUSES = frozenset({TOO_MANY_REQUESTS, 502, 503, 504})
"""Statuses by which a busy server, one that starts or stops, or a proxy says that nobody serves."""
UNREACHABLE_CODES = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT}
)
OUTAGE_ERRORS = re.compile(
    r"\w*Connect\w*|(Read|Write|Close|Proxy|RemoteProtocol|ServerDisconnected|ClientPayload)Error"
    "|IncompleteRead"
)
"""Names of errors of HTTP clients (httpx, aiohttp, requests, urllib) without a connection, or whose
connection broke."""


@dataclass(frozen=True)
class Outage:
    """Service that does not answer, by the name of its gate: its last error, and since when.

    stage: stage whose work waits; "" outside a run.
    """

    service: str
    reason: str
    down_s: float
    stage: str = ""


class ServiceGate:
    """Gate of one service for all callers of an event loop (`get_gate`).

    num_answers: requests that the service has answered.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._clock = asyncio.get_running_loop().time
        self._turn = asyncio.Lock()
        self._down_since = self._pause_s = 0.0
        self._error: ServiceOutageError | None = None
        self.num_answers = 0

    @property
    def outage(self) -> Outage | None:
        error, down_s = self._error, self._clock() - self._down_since
        return Outage(self._service, str(error), down_s) if error is not None else None

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Wait while the service is down, unless it is this caller's turn to try; run a request.

        A ServiceOutageError of the request begins or continues the outage. Any other end but a
        cancellation is an answer, and ends it.
        """
        async with AsyncExitStack() as stack:
            if self._error is not None:
                await stack.enter_async_context(self._turn)
                if self._error is None:
                    await stack.aclose()
                else:
                    pause_s, self._pause_s = self._pause_s, 2 * self._pause_s
                    await asyncio.sleep(min(pause_s, self._error.retry_after_s or LONGEST_PAUSE_S))
            try:
                yield
            except ServiceOutageError as error:
                self.report_failure(error)
                raise
            except Exception:
                self._report_answer()
                raise
            self._report_answer()

    def report_failure(self, error: ServiceOutageError) -> None:
        """Begin an outage, or continue it with its latest error."""
        if self._error is None:
            self._down_since, self._pause_s = self._clock(), FIRST_PAUSE_S
            _log.warning("%s; waiting for it", error)
        self._error = error
        self._pause_s = error.retry_after_s or self._pause_s

    def _report_answer(self) -> None:
        self.num_answers += 1
        if self._error is not None:
            _log.warning("%s: it answers again", self._error)
            self._error = None


_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, ServiceGate]] = WeakKeyDictionary()


def get_gate(service: str) -> ServiceGate:
    """Return the gate of a service, by address or name, that this event loop's callers share."""
    gates = _gates.setdefault(asyncio.get_running_loop(), {})
    return gates.get(service) or gates.setdefault(service, ServiceGate(service))


async def list_outages(stage: str = "") -> list[Outage]:
    """Return the outages that callers on this event loop wait for."""
    gates = _gates.get(asyncio.get_running_loop(), {}).values()
    return [replace(gate.outage, stage=stage) for gate in gates if gate.outage]


async def wait_out_outages(
    gate: ServiceGate, attempt: Callable[[], Awaitable[T]], own_error: type[StreamError]
) -> T:
    """Await attempt(), anew after each outage; `gate.admit` runs its requests.

    Raises `own_error` if the attempt fails again and again while the service answers others, and
    ServiceOutageError after MAX_OUTAGE_S.
    """
    clock, failed_at = asyncio.get_running_loop().time, math.inf
    num_lone, num_answers = 0, gate.num_answers
    while True:
        try:
            return await attempt()
        except ServiceOutageError as error:
            gate.report_failure(error)
            failed_at = min(failed_at, clock())
            # A busy server refuses any item as often as it is busy.
            is_served = error.is_answer or gate.num_answers > num_answers
            num_lone += is_served and not error.retry_after_s
            num_answers = gate.num_answers
            if num_lone == MAX_LONE_FAILURES:
                raise own_error(f"{error} ({num_lone} times, while the server answers)") from error
            if clock() - failed_at > MAX_OUTAGE_S:
                raise ServiceOutageError(f"{error}, for {MAX_OUTAGE_S:g} s") from error


async def request_service(
    service: str, request: Callable[[], Awaitable[T]], own_error: type[StreamError]
) -> T:
    """Await request() behind the gate of a service; raises as `wait_out_outages` does."""
    gate = get_gate(service)

    async def attempt() -> T:
        async with gate.admit():
            return await request()

    return await wait_out_outages(gate, attempt, own_error)


async def is_silent(url: str) -> bool:
    """Return whether nobody answers at the URL of a service, within PING_TIMEOUT_S."""
    import httpx  # here: most processes of a run need none

    if get_gate(url).outage is not None:
        return True  # a request that began in the outage may time out as it ends
    try:
        # No certificate is checked: nothing is sent, and nothing of the answer is used.
        async with (
            asyncio.timeout(PING_TIMEOUT_S),  # httpx's is for each read
            httpx.AsyncClient(timeout=None, verify=False) as client,
            client.stream("GET", url) as response,  # a whole answer may be endless
        ):
            return response.status_code in UNAVAILABLE_STATUSES
    except (httpx.HTTPError, TimeoutError):
        return True


def is_outage(error: BaseException) -> bool:
    """Return whether an error, or one that it arose from, is that nobody answers at an address.

    Errors of HTTP clients with UNAVAILABLE_STATUSES count, too. A broken pipe alone does not: what
    ended may be a process on this machine that the item in hand brought down.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_outage, error.exceptions))
    if (
        isinstance(error, ServiceOutageError | socket.gaierror | ssl.SSLError)
        or (isinstance(error, ConnectionError) and not isinstance(error, BrokenPipeError))
        or (isinstance(error, OSError) and error.errno in UNREACHABLE_CODES)
        or OUTAGE_ERRORS.fullmatch(type(error).__name__)
        or _find_status(error) in UNAVAILABLE_STATUSES
    ):
        return True
    origin = error.__cause__ or error.__context__
    return origin is not None and is_outage(origin)


def describe_failure(error: BaseException) -> str:
    """Return in one line why a request to a service failed."""
    if status := _find_status(error):
        return f"HTTP status {status}"
    reason = get_message(error)
    return f"nobody answers ({reason})" if is_outage(error) else reason


def _find_status(error: BaseException) -> Any:
    """Return the HTTP status that a client's error has; None without any."""
    for place in ("response.status_code", "status"):
        with contextlib.suppress(AttributeError):
            return operator.attrgetter(place)(error)
    return None
