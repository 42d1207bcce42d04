"""Gates before services outside the run, such as a judge's endpoint: one probe during an outage.

    caller --admit--> request        the service answers: requests pass side by side
                      |
               ServiceOutageError    nobody answers: all callers wait, one at a time tries again

An outage is never the fault of the item in hand. Its holder waits, with its lease, and the run ends
if the outage lasts too long (pipeline.outage_s).
"""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakKeyDictionary

import httpx

from streamrl.errors import ServiceOutageError, StreamError

T = TypeVar("T")
_log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Pauses between two tries of a service that does not answer: the first, doubled up to the longest.
"""
DEFAULT_LIMIT_S = 1800.0
PING_TIMEOUT_S = 10.0
MAX_LONE_FAILURES = 8
"""Failures of an item, while the service answered others in between, after which the item itself
brings the service down. Of a pair of servers behind one address, one may be out for long."""
TOO_MANY_REQUESTS = 429
UNAVAILABLE_STATUSES = frozenset({TOO_MANY_REQUESTS, 502, 503, 504})
"""Statuses by which a busy server, one that starts or stops, or a proxy says that nobody serves."""
OUTAGE_ERRORS = frozenset(
    {
        *("ConnectError", "ConnectTimeout", "ReadError", "WriteError", "CloseError"),
        *("RemoteProtocolError", "ProxyError", "ServerDisconnectedError"),
    }
)
"""Names of errors of HTTP clients (httpx, aiohttp) that come without a ConnectionError."""


@dataclass(frozen=True)
class Outage:
    """Service that does not answer: since when, its last error, and how many callers wait.

    service: name of its gate. stage: stage whose work waits; "" outside a run.
    """

    service: str
    reason: str
    down_s: float
    num_waiting: int
    stage: str = ""


class ServiceGate:
    """Gate of one service for all callers of an event loop (`get_gate`).

    limit_s: longest outage. num_answers: requests that the service has answered.
    """

    def __init__(self, service: str, limit_s: float) -> None:
        self.service = service
        self.clock = asyncio.get_running_loop().time
        self._turn = asyncio.Lock()
        self._down_since = 0.0
        self._num_waiting = 0
        self._pause_s = FIRST_PAUSE_S
        self._error: ServiceOutageError | None = None
        self.limit_s = limit_s
        self.num_answers = 0

    @property
    def outage(self) -> Outage | None:
        if self._error is None:
            return None
        down_s = self.clock() - self._down_since
        return Outage(self.service, str(self._error), down_s, self._num_waiting)

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Wait while the service is down, unless it is this caller's turn to try; run a request.

        A ServiceOutageError of the request begins or continues the outage. Any other end but a
        cancellation is an answer, and ends it.
        """
        async with AsyncExitStack() as stack:
            if self._error is not None:
                await self._wait_for_turn(stack)
            try:
                yield
            except ServiceOutageError as error:
                self.report_failure(error)
                raise
            except Exception:
                self._report_answer()
                raise
            self._report_answer()

    async def _wait_for_turn(self, stack: AsyncExitStack) -> None:
        """Wait until the service answers, or hold the turn to try it after a pause."""
        self._num_waiting += 1
        try:
            await stack.enter_async_context(self._turn)
            if self._error is None:
                await stack.aclose()
                return
            await asyncio.sleep(min(self._pause_s, self.limit_s))
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        finally:
            self._num_waiting -= 1

    def report_failure(self, error: ServiceOutageError) -> None:
        """Begin an outage, or continue it with its latest error."""
        if self._error is None:
            self._down_since, self._pause_s = self.clock(), FIRST_PAUSE_S
            _log.warning("%s; waiting for it", error)
        self._error = error
        self._pause_s = error.retry_after_s or self._pause_s

    def check_limit(self) -> None:
        """Raise ServiceOutageError once an outage has lasted for `limit_s`."""
        if self._error is not None and self.clock() - self._down_since > self.limit_s:
            raise ServiceOutageError(f"{self._error}, for {self.limit_s:g} s") from self._error

    def _report_answer(self) -> None:
        self.num_answers += 1
        if self._error is not None:
            seconds = self.clock() - self._down_since
            _log.warning("%s: it answers again after %.0f s", self._error, seconds)
            self._error = None


class _GateRegistry(dict[str, ServiceGate]):
    """Gates of an event loop, by service. limit_s: longest outage."""

    limit_s = DEFAULT_LIMIT_S

    def __missing__(self, service: str) -> ServiceGate:
        gate = self[service] = ServiceGate(service, self.limit_s)
        return gate


_registries: WeakKeyDictionary[asyncio.AbstractEventLoop, _GateRegistry] = WeakKeyDictionary()


def _get_registry() -> _GateRegistry:
    return _registries.setdefault(asyncio.get_running_loop(), _GateRegistry())


def get_gate(service: str) -> ServiceGate:
    """Return the gate of a service, by address or name, that this event loop's callers share."""
    return _get_registry()[service]


def limit_outages(limit_s: float) -> None:
    """Set the longest outage of the services of this event loop, before their first use."""
    _get_registry().limit_s = limit_s


async def list_outages(stage: str = "") -> list[Outage]:
    """Return the outages that callers on this event loop wait for."""
    outages = [gate.outage for gate in _get_registry().values()]
    return [replace(outage, stage=stage) for outage in outages if outage]


async def wait_out_outages(
    gate: ServiceGate, attempt: Callable[[], Awaitable[T]], own_error: type[StreamError]
) -> T:
    """Await attempt(), anew after each outage; `gate.admit` runs its requests.

    Raises `own_error` if the attempt fails again and again while the service answers others, and
    ServiceOutageError at the limit of the gate.
    """
    num_lone, num_answers, first_failed_at = 0, gate.num_answers, math.inf
    while True:
        try:
            return await attempt()
        except ServiceOutageError as error:
            gate.report_failure(error)
            gate.check_limit()
            first_failed_at = min(first_failed_at, gate.clock())
            # A busy server refuses any item as often as it is busy.
            num_lone += gate.num_answers > num_answers and not error.retry_after_s
            num_answers = gate.num_answers
            waited_s = gate.clock() - first_failed_at
            if num_lone == MAX_LONE_FAILURES or waited_s > gate.limit_s:
                raise own_error(f"{error}, for {waited_s:.0f} s; others are served") from error


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
    if get_gate(url).outage is not None:
        return True  # a request that began in the outage may time out as it ends
    try:
        # No certificate is checked: nothing is sent, and nothing of the answer is used.
        async with httpx.AsyncClient(timeout=PING_TIMEOUT_S, verify=False) as client:
            return (await client.get(url)).status_code in UNAVAILABLE_STATUSES
    except httpx.HTTPError:
        return True


def is_outage(error: BaseException) -> bool:
    """Return whether an error, or one that it arose from, is that nobody answers at an address."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_outage, error.exceptions))
    if isinstance(error, ConnectionError | socket.gaierror):
        return True
    if type(error).__name__ in OUTAGE_ERRORS:
        return True
    origin = error.__cause__ or error.__context__
    return origin is not None and is_outage(origin)
