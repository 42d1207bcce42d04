"""A model behind an OpenAI-compatible server: asked at a bounded pace, its failures told apart."""

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import msgspec
import openai

from streamrl.errors import ConfigError, RewardError, RewardInfraError, RewardTimeoutError

T = TypeVar("T")

STARTUP_TIMEOUT_S = 60.0
"""How long a server may take to come up, s."""
POLL_INTERVAL_S = 1.0
"""How often one that is not up is asked, s."""
MIN_RETRY_WAIT_S = 0.1
"""A server that asks for no wait at all gets this one, s."""
MAX_ERROR_CHARS = 300
"""Most characters of what a server says in an error."""
TRANSIENT_STATUSES, FIRST_SERVER_ERROR = (408, 409, 425, 429), 500
"""Statuses that say nothing of the request: these, and all from SERVER_ERROR on."""


class RateLimiter:
    """Lets through so many units a minute, evenly and in the order of arrival; 0: all at once.

    Not a bucket, as of aiolimiter: that lets twice as many through in the first minute, and large
    requests wait until no small one does. A judge would lose the long completions to its deadline.
    """

    def __init__(self, per_minute: float) -> None:
        self._seconds_per_unit = 60.0 / per_minute if per_minute else 0.0
        self._next_free_time = 0.0

    async def acquire(self, units: float) -> None:
        """Until those before have had their time."""
        now = asyncio.get_running_loop().time()
        turn = max(now, self._next_free_time)
        self._next_free_time = turn + units * self._seconds_per_unit
        await asyncio.sleep(turn - now)


@dataclass(frozen=True)
class RequestLimits:
    """Of one process: requests at once, requests and tokens a minute (0: as many as may be).

    timeout_s: deadline from a request to its answer, with the waits that the server asks for.
    """

    concurrency: int
    requests_per_minute: float
    tokens_per_minute: float
    timeout_s: float


class _RetryAfterError(RewardInfraError):
    """A refusal that says when to come back: in `retry_after_s`."""

    retry_after_s = 0.0


@dataclass(frozen=True)
class ChatResponse:
    """What a model said; `is_cut`: it was not let finish."""

    text: str
    is_truncated: bool


class _ChatMessage(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _ChatMessage
    finish_reason: str | None = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_ChatChoice]


class _ModelInfo(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelInfo]


class ChatClient:
    """The server at `url`, as of `https://host/v1`. `key` goes to it alone, and into no message."""

    def __init__(self, url: str, model: str, key: str, limits: RequestLimits) -> None:
        self._url = url
        self._model = model
        self._api_key = key
        self._timeout_s = limits.timeout_s
        # With no key given the package would send whatever OPENAI_API_KEY holds, wherever that is.
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=key or "none", max_retries=0, timeout=limits.timeout_s
        )
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._request_limiter = RateLimiter(limits.requests_per_minute)
        self._token_limiter = RateLimiter(limits.tokens_per_minute)

    async def wait_until_ready(self) -> str:
        """Wait until the server answers; a line if it did not at once, which is warned of then.

        Raises ConfigError if it does not in START_S, refuses, or has no model of that name.
        """
        clock = asyncio.get_running_loop().time
        began, note = clock(), ""
        while True:
            try:
                names = await self._list_models()
                break
            except RewardInfraError as error:
                if clock() - began > STARTUP_TIMEOUT_S:
                    raise ConfigError(
                        f"rewards.url={error} (for {STARTUP_TIMEOUT_S:g} s)"
                    ) from None
                if not note:
                    said = f"{error}; it has {STARTUP_TIMEOUT_S:g} s to come up"
                    warnings.warn(said, stacklevel=2)
                await asyncio.sleep(POLL_INTERVAL_S)
                note = f"{self._url}: there after {clock() - began:.0f} s"
            except RewardError as error:
                raise ConfigError(f"rewards.url={error} (asked for {self._url}/models)") from None
        if names and self._model not in names:
            raise ConfigError(
                f"rewards.model={self._model}: {self._url} has {', '.join(sorted(names)[:10])}"
            )
        return note

    async def _list_models(self) -> list[str]:
        async with self._request_deadline():
            found = await self._send_request(self._client.models.with_raw_response.list, _ModelList)
            return [model.id for model in found.data]

    async def request_completion(
        self, text: str, *, tokens: int, request: Mapping[str, Any]
    ) -> ChatResponse:
        """What the model answers to a text; `tokens` is what both count for in the limits.

        `request` is what else the server is told. Raises InfraError for what may pass, such as a
        busy server (RewardTimeoutError at the deadline), and RewardError for what will not, such as
        a wrong key.
        """
        # Half a surrogate pair is no text that can be sent.
        content = text.encode("utf-8", "replace").decode("utf-8")
        messages: Any = [{"role": "user", "content": content}]
        create = self._client.chat.completions.with_raw_response.create

        def send() -> Awaitable[Any]:
            return create(model=self._model, messages=messages, **request)

        async with self._slots:
            await self._wait_for_rate_limits(tokens)
            async with self._request_deadline() as deadline:
                while True:
                    try:
                        found = await self._send_request(send, _ChatCompletion)
                        break
                    except _RetryAfterError as busy:
                        await self._wait_to_retry(busy, deadline)
                        await self._wait_for_rate_limits(tokens)
        if not found.choices:
            raise RewardInfraError(f"{self._url}: answered without a choice")
        choice = found.choices[0]
        return ChatResponse(
            choice.message.content or "", is_truncated=choice.finish_reason == "length"
        )

    async def _wait_for_rate_limits(self, tokens: int) -> None:
        await self._request_limiter.acquire(1)
        await self._token_limiter.acquire(tokens)

    @staticmethod
    async def _wait_to_retry(busy: _RetryAfterError, deadline: asyncio.Timeout) -> None:
        ends = deadline.when()
        if ends is not None and asyncio.get_running_loop().time() + busy.retry_after_s >= ends:
            raise RewardInfraError(f"{busy} (come back in {busy.retry_after_s:g} s)") from None
        await asyncio.sleep(busy.retry_after_s)

    @asynccontextmanager
    async def _request_deadline(self) -> AsyncIterator[asyncio.Timeout]:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                yield deadline
        except TimeoutError:
            raise RewardTimeoutError(f"{self._url}: no answer in {self._timeout_s:g} s") from None

    async def _send_request(self, send: Callable[[], Awaitable[Any]], kind: type[T]) -> T:
        """The answer to one request. Raises as `ask` does, or _BusyError."""
        try:
            raw = await send()
        except openai.APIStatusError as error:
            raise self._to_reward_error(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise RewardInfraError(
                self._redact_message(f"{type(cause).__name__}: {cause}")
            ) from None
        try:
            return msgspec.json.decode(raw.http_response.content, type=kind)
        except msgspec.DecodeError as error:
            raise RewardInfraError(f"{self._url}: answered what cannot be read: {error}") from None

    def _to_reward_error(self, error: openai.APIStatusError) -> RewardError:
        body: Any = error.body
        told = (body.get("message") if isinstance(body, dict) else None) or body
        words = self._redact_message(f"{error.status_code}: {told or error.response.reason_phrase}")
        if error.status_code < FIRST_SERVER_ERROR and error.status_code not in TRANSIENT_STATUSES:
            return RewardError(words)
        wait_s = parse_retry_after(error.response.headers.get("retry-after", ""))
        if wait_s is None:
            return RewardInfraError(words)
        busy = _RetryAfterError(words)
        busy.retry_after_s = max(wait_s, MIN_RETRY_WAIT_S)
        return busy

    def _redact_message(self, text: str) -> str:
        line = " ".join(f"{self._url}: {text}".split())
        return (line.replace(self._api_key, "***") if self._api_key else line)[:MAX_ERROR_CHARS]

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()


def parse_retry_after(header: str) -> float | None:
    """Seconds to wait as the header of that name says, in seconds or as a date; None: nothing."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None
