"""Client of an OpenAI-compatible server with rate limits and classified errors."""

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

from streamrl.errors import (
    ConfigError,
    RewardError,
    RewardInfraError,
    RewardTimeoutError,
    ServiceOutageError,
    StreamError,
)
from streamrl.stream.service_gate import (
    TOO_MANY_REQUESTS,
    UNAVAILABLE_STATUSES,
    is_outage,
    is_silent,
    request_service,
)

T = TypeVar("T")

STARTUP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 1.0
MIN_RETRY_WAIT_S = 0.1
"""Shortest wait before a retry, also if the server says "retry-after: 0"."""
BUSY_WAIT_S = 1.0
"""Wait of a request that a busy server refuses without a "retry-after"."""
MAX_ERROR_CHARS = 300
TRANSIENT_STATUSES, FIRST_SERVER_ERROR = (408, 409, 425, 429), 500
"""Retryable statuses: these, and all from FIRST_SERVER_ERROR on."""


class RateLimiter:
    """Rate limit: admits `per_minute` requests or tokens, evenly spaced in FIFO order; 0: no limit.

    A token bucket (aiolimiter) would admit twice the rate in the first minute and starve large
    requests behind small ones: long completions would exceed their deadline.
    """

    def __init__(self, per_minute: float) -> None:
        self._seconds_per_unit = 60.0 / per_minute if per_minute else 0.0
        self._next_free_time = 0.0

    async def acquire(self, units: float) -> None:
        now = asyncio.get_running_loop().time()
        start_time = max(now, self._next_free_time)
        self._next_free_time = start_time + units * self._seconds_per_unit
        await asyncio.sleep(start_time - now)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the requests that this process sends to a server; a rate of 0 means no limit.

    timeout_s: deadline of a request, without waits for a server that is busy or out.
    """

    concurrency: int
    requests_per_minute: float
    tokens_per_minute: float
    timeout_s: float


@dataclass(frozen=True)
class ChatResponse:
    """Text of a chat completion. is_truncated: the text was cut off at max_tokens."""

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
    """Client of the OpenAI-compatible server at `url`, such as https://host/v1.

    key: API key, sent to this server only and redacted from error messages; may be empty.
    """

    def __init__(self, url: str, model: str, key: str, limits: RequestLimits) -> None:
        self._url = url
        self._model = model
        self._api_key = key
        self._timeout_s = limits.timeout_s
        # Without api_key the openai package would send the value of OPENAI_API_KEY to any server.
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=key or "none", max_retries=0, timeout=limits.timeout_s
        )
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._request_limiter = RateLimiter(limits.requests_per_minute)
        self._token_limiter = RateLimiter(limits.tokens_per_minute)

    async def wait_until_ready(self) -> str:
        """Wait until the server responds; return a note for the user, empty if there was no wait.

        Warns when waiting starts. Raises ConfigError if the server does not respond within
        STARTUP_TIMEOUT_S, rejects the request, or does not serve the model.
        """
        clock = asyncio.get_running_loop().time
        started, note = clock(), ""
        while True:
            try:
                names = await self._list_models()
                break
            except (RewardInfraError, ServiceOutageError) as error:
                if clock() - started > STARTUP_TIMEOUT_S:
                    raise ConfigError(
                        f"rewards.url={error} (for {STARTUP_TIMEOUT_S:g} s)"
                    ) from None
                if not note:
                    warning = f"{error}; waiting up to {STARTUP_TIMEOUT_S:g} s for the server"
                    warnings.warn(warning, stacklevel=2)
                await asyncio.sleep(POLL_INTERVAL_S)
                note = f"{self._url}: ready after {clock() - started:.0f} s"
            except RewardError as error:
                raise ConfigError(f"rewards.url={error} (GET {self._url}/models)") from None
        if names and self._model not in names:
            raise ConfigError(
                f"rewards.model={self._model}: {self._url} has {', '.join(sorted(names)[:10])}"
            )
        return note

    async def _list_models(self) -> list[str]:
        async with self._request_deadline():
            models = await self._send_request(
                self._client.models.with_raw_response.list, _ModelList
            )
            return [model.id for model in models.data]

    async def request_completion(
        self, text: str, *, tokens: int, request: Mapping[str, Any]
    ) -> ChatResponse:
        """Request a chat completion for `text`; wait while the server does not answer at all.

        tokens: tokens of text and response, counted against the rate limit. request: further fields
        of the request. Raises RewardInfraError for transient errors of the server,
        RewardTimeoutError at the deadline, and RewardError for permanent errors such as a bad key.
        """
        # A lone surrogate cannot be encoded as UTF-8.
        content = text.encode("utf-8", "replace").decode("utf-8")
        messages: Any = [{"role": "user", "content": content}]
        create = self._client.chat.completions.with_raw_response.create

        def send() -> Awaitable[Any]:
            return create(model=self._model, messages=messages, **request)

        async def complete() -> _ChatCompletion:
            async with self._slots:
                await self._wait_for_rate_limits(tokens)
                async with self._request_deadline():
                    return await self._send_request(send, _ChatCompletion)

        completion = await request_service(self._url, complete, RewardInfraError)
        if not completion.choices:
            raise RewardInfraError(f"{self._url}: response without choices")
        choice = completion.choices[0]
        return ChatResponse(
            choice.message.content or "", is_truncated=choice.finish_reason == "length"
        )

    async def _wait_for_rate_limits(self, tokens: int) -> None:
        await self._request_limiter.acquire(1)
        await self._token_limiter.acquire(tokens)

    @asynccontextmanager
    async def _request_deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            # A request may be slow because of its text; a server that answers nobody is out.
            kind = ServiceOutageError if await is_silent(self._url) else RewardTimeoutError
            raise kind(f"{self._url}: no answer in {self._timeout_s:g} s") from None

    async def _send_request(self, send: Callable[[], Awaitable[Any]], form: type[T]) -> T:
        """Send a request and decode the JSON response to type `form`."""
        try:
            raw = await send()
        except openai.APIStatusError as error:
            raise self._to_reward_error(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if isinstance(error, openai.APITimeoutError) and not is_outage(cause):
                raise TimeoutError from None
            kind = ServiceOutageError if is_outage(cause) else RewardInfraError
            raise kind(self._redact_message(f"{type(cause).__name__}: {cause}")) from None
        try:
            return msgspec.json.decode(raw.http_response.content, type=form)
        except msgspec.DecodeError as error:
            raise RewardInfraError(f"{self._url}: invalid response: {error}") from None

    def _to_reward_error(self, error: openai.APIStatusError) -> StreamError:
        body: Any = error.body
        reason = (body.get("message") if isinstance(body, dict) else None) or body
        reason = reason or error.response.reason_phrase
        message = self._redact_message(f"{error.status_code}: {reason}")
        if error.status_code < FIRST_SERVER_ERROR and error.status_code not in TRANSIENT_STATUSES:
            return RewardError(message)
        wait_s = parse_retry_after(error.response.headers.get("retry-after", ""))
        if wait_s is None and error.status_code == TOO_MANY_REQUESTS:
            wait_s = BUSY_WAIT_S
        if wait_s is None and error.status_code not in UNAVAILABLE_STATUSES:
            return RewardInfraError(message)
        outage = ServiceOutageError(message)
        outage.retry_after_s = 0.0 if wait_s is None else max(wait_s, MIN_RETRY_WAIT_S)
        return outage

    def _redact_message(self, text: str) -> str:
        """Return an error message on a single line, with the URL and without the API key."""
        line = " ".join(f"{self._url}: {text}".split())
        return (line.replace(self._api_key, "***") if self._api_key else line)[:MAX_ERROR_CHARS]

    async def close(self) -> None:
        await self._client.close()


def parse_retry_after(header: str) -> float | None:
    """Parse a retry-after header, seconds or HTTP date, to seconds; None if absent or invalid."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None
