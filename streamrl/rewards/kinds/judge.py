"""Kind `judge`: LLM as a judge behind an OpenAI-compatible API, such as a vLLM server."""

import asyncio
import json
import math
import os
import re
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import openai
from omegaconf import MISSING

from streamrl.errors import (
    ConfigError,
    RewardError,
    RewardInfraError,
    RewardTimeoutError,
    ServiceOutageError,
    StreamError,
)
from streamrl.files.bounded_read import read_small_text
from streamrl.files.typed_settings import check_minimums
from streamrl.messages import Prompt
from streamrl.rewards.interface.completion import CONVERSATION, Completion
from streamrl.rewards.interface.extract import AnswerPattern
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.user_code.reward_result import RewardResult
from streamrl.user_code.service_gate import (
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
REFUSALS_OF_ALL = (401, 402, 403, 404)
"""Statuses of a server that took key and model at the start and no longer does."""


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
                self._client.models.with_raw_response.list, _ModelList, is_start=True
            )
            return [model.id for model in models.data]

    async def request_completion(
        self, text: str, *, tokens: int, request: Mapping[str, Any]
    ) -> ChatResponse:
        """Request a chat completion for `text`; wait while the server does not answer at all.

        tokens: tokens of text and response, counted against the rate limit. request: further fields
        of the request. Raises RewardInfraError for transient errors of the server,
        RewardTimeoutError at the deadline, and RewardError for a request that the server refuses.
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

    async def _send_request(
        self, send: Callable[[], Awaitable[Any]], form: type[T], *, is_start: bool = False
    ) -> T:
        """Send a request and decode the JSON response to type `form`.

        is_start: the first request, which shows whether key and model are right.
        """
        try:
            raw = await send()
        except openai.APIStatusError as error:
            raise self._to_reward_error(error, is_start=is_start) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if isinstance(error, openai.APITimeoutError) and not is_outage(cause):
                raise TimeoutError from None
            kind = ServiceOutageError if is_outage(cause) else RewardInfraError
            raise kind(self._redact_message(f"{type(cause).__name__}: {cause}")) from None
        try:
            return msgspec.json.decode(raw.http_response.content, type=form)
        except msgspec.DecodeError as error:
            # A page instead of JSON comes from a proxy whose server is away.
            is_page = not isinstance(error, msgspec.ValidationError) and not is_start
            kind = ServiceOutageError if is_page else RewardInfraError
            raise kind(f"{self._url}: invalid response: {error}") from None

    def _to_reward_error(self, error: openai.APIStatusError, *, is_start: bool) -> StreamError:
        body: Any = error.body
        reason = (body.get("message") if isinstance(body, dict) else None) or body
        reason = reason or error.response.reason_phrase
        message = self._redact_message(f"{error.status_code}: {reason}")
        is_server_error = error.status_code >= FIRST_SERVER_ERROR
        refuses_all = not is_start and (is_server_error or error.status_code in REFUSALS_OF_ALL)
        if not (refuses_all or is_server_error or error.status_code in TRANSIENT_STATUSES):
            return RewardError(message)
        wait_s = parse_retry_after(error.response.headers.get("retry-after", ""))
        if wait_s is None and error.status_code == TOO_MANY_REQUESTS:
            wait_s = BUSY_WAIT_S
        if wait_s is None and not refuses_all and error.status_code not in UNAVAILABLE_STATUSES:
            return RewardInfraError(message)
        outage = ServiceOutageError(message)
        outage.is_answer = is_server_error and error.status_code not in UNAVAILABLE_STATUSES
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


PLACEHOLDER = re.compile(r"\{(prompt|completion|ground_truth)\}")
BYTES_PER_TOKEN = 3
"""Estimate for tokens_per_minute; on the safe side, as most texts have more bytes per token."""
MAX_DETAIL_CHARS = 300
"""Characters from the end of a judge's response kept in RewardResult.detail."""


@dataclass
class JudgeOptions(RetryOptions):
    """Options of kind judge; `attempts` counts requests per completion.

    url: base URL of the API, such as http://localhost:8000/v1.
    model: name of the model on the server.
    template: prompt of the judge, with {completion} and optionally {prompt} and {ground_truth}.
    path: file with the template, instead of `template`.
    pattern: regular expression of the number in the response: first group of the last match.
    least: lowest valid number; a number outside [least, most] is an invalid response.
    most: highest valid number.
    pass_score: lowest number that passes; null: most.
    temperature: sampling temperature of the judge.
    max_tokens: limit of the response, tokens.
    request: further fields of the chat completion request.
    api_key_env: name of the environment variable with the API key; empty: no key.
    concurrency: concurrent requests per scorer.
    requests_per_minute: rate limit of all scorers together; 0: no limit.
    tokens_per_minute: rate limit of all scorers together, counting estimated input tokens and
        max_tokens; 0: no limit.
    """

    url: str = MISSING
    model: str = MISSING
    template: str = ""
    path: str = ""
    pattern: str = MISSING
    least: float = 0.0
    most: float = 1.0
    pass_score: float | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    request: dict[str, Any] = field(default_factory=dict)
    api_key_env: str = ""
    concurrency: int = 32
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(f"url={self.url}: must begin with http:// or https://")
        if bool(self.template) == bool(self.path):
            raise ConfigError("template: give either template or path, not both")
        if not -math.inf < self.least < self.most < math.inf:
            raise ConfigError(f"least={self.least}: must be below most={self.most}, both finite")
        check_minimums(self, {"max_tokens": 1, "concurrency": 1})
        for key in ("temperature", "requests_per_minute", "tokens_per_minute"):
            if not 0 <= vars(self)[key] < math.inf:
                raise ConfigError(f"{key}={vars(self)[key]}: must be 0 or more, and finite")


class JudgeReward(Reward):
    """Sends a request to the judge per completion; requests of a group run concurrently.

    Raises ConfigError for an unusable template, pattern or API key.
    """

    def __init__(self, spec: RewardSpec[JudgeOptions]) -> None:
        super().__init__()
        self._options = options = spec.options
        self._template = _load_template(options)
        self._api_key = _load_api_key(options.api_key_env)
        self._pattern = AnswerPattern(options.pattern)
        self._pass_score = options.most if options.pass_score is None else options.pass_score
        self._scorer_config = spec.context.scorer
        self._request_fields = {
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "extra_body": options.request,
        }
        self._client: ChatClient | None = None

    def validate_prompt(self, prompt: Prompt) -> None:
        if "{ground_truth}" in self._template and prompt.ground_truth is None:
            raise RewardError("the template has {ground_truth}, the row has none")

    async def run_preflight(self) -> str:
        """Wait for the server. Raises ConfigError if the server stays down or lacks the model."""
        client = self._make_client()
        try:
            return await client.wait_until_ready()
        finally:
            await client.close()

    async def start(self) -> None:
        """Create the client. Does not contact the server: requests are retried in an outage."""
        self._client = self._make_client()

    def _make_client(self) -> "ChatClient":
        """Build the client; scorer replicas share the rate limits equally."""
        from streamrl.rewards.kinds.judge import ChatClient, RequestLimits

        options, replicas = self._options, self._scorer_config.replicas
        limits = RequestLimits(
            options.concurrency,
            options.requests_per_minute / replicas,
            options.tokens_per_minute / replicas,
            options.timeout_s or self._scorer_config.timeout_s,
        )
        return ChatClient(options.url.rstrip("/"), options.model, self._api_key, limits)

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        """Judge each completion. The first RewardError cancels the other requests of the group."""
        self.validate_prompt(prompt)
        tasks = [
            asyncio.create_task(self._judge_text(prompt, _write_completion(completion, part)))
            for completion in completions
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _judge_text(self, prompt: Prompt, completion: str) -> RewardResult:
        text = _fill_template(self._template, prompt, completion)
        result: RewardResult = await retry_infra_errors(
            lambda: self._judge_once(text), self._options.attempts
        )
        return result

    async def _judge_once(self, text: str) -> RewardResult:
        """Request a judgment. Raises RewardInfraError for a response cut or without a number."""
        assert self._client is not None
        size = len(text.encode("utf-8", "replace"))
        response = await self._client.request_completion(
            text,
            tokens=size // BYTES_PER_TOKEN + 1 + self._options.max_tokens,
            request=self._request_fields,
        )
        # In a thread: a regular expression may take up to SEARCH_TIMEOUT_S.
        number = await asyncio.to_thread(self._parse_score, response.text)
        if response.is_truncated:
            # The rest may change the number: "Score: 1" of 10, or a last match that is to come.
            raise RewardInfraError(
                f"the judge's response was cut at rewards.max_tokens={self._options.max_tokens};"
                f" raise it: {response.text[-100:]!r}"
            )
        if number is None:
            raise RewardInfraError(
                f"rewards.pattern matches no number from {self._options.least:g} to"
                f" {self._options.most:g} in the judge's response: {response.text[-100:]!r}"
            )
        detail = response.text[-MAX_DETAIL_CHARS:]
        passes = number >= self._pass_score
        return RewardResult.from_correctness(passes, score=number, detail=detail)

    def _parse_score(self, response: str) -> float | None:
        try:
            number = float(self._pattern.find_last(response) or "")
        except ValueError:
            return None
        return number if self._options.least <= number <= self._options.most else None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def _load_template(options: JudgeOptions) -> str:
    setting, template = "rewards.template", options.template
    if options.path:
        setting = f"rewards.path={options.path}"
        try:
            template = read_small_text(Path(options.path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: cannot be read: {error}") from None
    if "{completion}" not in template:
        raise ConfigError(f"{setting}: must contain {{completion}}")
    return template


def _load_api_key(name: str) -> str:
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise ConfigError(
            f"rewards.api_key_env={name}: this environment variable is not set, or empty"
        )
    return key


def _fill_template(template: str, prompt: Prompt, completion: str) -> str:
    """Fill the placeholders, in a single pass that keeps braces inside a filled text."""
    texts = {
        "prompt": _render_conversation(prompt.messages),
        "completion": completion,
        "ground_truth": _to_text(prompt.ground_truth),
    }
    return PLACEHOLDER.sub(lambda match: texts[match[1]], template)


def _write_completion(completion: Completion, part: str) -> str:
    """Return the text of a part; of an episode's conversation, a chat message per line as JSON.

    In JSON the policy cannot write a line that looks like a message of its environment.
    """
    if part == CONVERSATION and completion.messages:
        return "\n".join(json.dumps(m, ensure_ascii=False) for m in completion.messages)
    return completion.get_part(part)


def _render_conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _to_text(truth: Any) -> str:
    return truth if isinstance(truth, str) else json.dumps(truth, default=str, ensure_ascii=False)
