"""Kind `judge`: LLM as a judge behind an OpenAI-compatible API, such as a vLLM server."""

import asyncio
import contextlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from omegaconf import MISSING

from streamrl.errors import (
    ConfigError,
    RewardError,
    RewardInfraError,
    RewardTimeoutError,
    ServiceOutageError,
    StreamError,
)
from streamrl.files.typed_settings import at_least, check_conflicts
from streamrl.messages import Prompt
from streamrl.rewards.interface.answers import AnswerPattern
from streamrl.rewards.interface.completion import CONVERSATION, Completion
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.reward_result import RewardResult
from streamrl.user_code.service_gate import (
    TOO_MANY_REQUESTS,
    UNAVAILABLE_STATUSES,
    is_outage,
    is_silent,
    request_service,
)

if TYPE_CHECKING:
    import httpx

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


class ChatClient:
    """Client of the OpenAI-compatible server at `url`, such as https://host/v1.

    key: API key, sent to this server only and redacted from error messages; may be empty.
    timeout_s: deadline of a request, without waits for a server that is busy or out.
    """

    def __init__(
        self, url: str, model: str, key: str, *, concurrency: int, timeout_s: float, entry: str
    ) -> None:
        import httpx  # here: most processes of a run need none

        self._entry = entry
        self._url = url
        self._model = model
        self._api_key = key
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=None,
            limits=httpx.Limits(max_connections=concurrency),
            follow_redirects=True,
        )
        self._slots = asyncio.Semaphore(concurrency)

    async def wait_until_ready(self) -> None:
        """Wait until the server responds; warn when waiting starts.

        Raises ConfigError if the server does not respond within STARTUP_TIMEOUT_S, rejects the
        request, or does not serve the model.
        """

        def read_names(reply: Any) -> set[str]:
            return {str(model["id"]) for model in reply["data"]}

        clock = asyncio.get_running_loop().time
        started, is_waiting = clock(), False
        while True:
            try:
                names = await self._request_json("GET", "/models", read_names)
                break
            except (RewardInfraError, ServiceOutageError) as error:
                if clock() - started > STARTUP_TIMEOUT_S:
                    raise ConfigError(
                        f"{self._entry}.url={error} (for {STARTUP_TIMEOUT_S:g} s)"
                    ) from None
                if not is_waiting:
                    warning = f"{error}; waiting up to {STARTUP_TIMEOUT_S:g} s for the server"
                    warnings.warn(warning, stacklevel=2)
                is_waiting = True
                await asyncio.sleep(POLL_INTERVAL_S)
            except RewardError as error:
                raise ConfigError(f"{self._entry}.url={error} (GET {self._url}/models)") from None
        if names and self._model not in names:
            raise ConfigError(
                f"{self._entry}.model={self._model}: {self._url} has"
                f" {', '.join(sorted(names)[:10])}"
            )

    async def request_completion(self, text: str, request: Mapping[str, Any]) -> tuple[str, bool]:
        """Request a chat completion for `text`; wait while the server does not answer at all.

        request: further fields of the request. Returns the text of the response, and whether it was
        cut off at max_tokens. Raises RewardInfraError for transient errors of the server,
        RewardTimeoutError at the deadline, and RewardError for a request that the server refuses.
        """
        # A lone surrogate cannot be encoded as UTF-8.
        content = text.encode("utf-8", "replace").decode("utf-8")
        messages = [{"role": "user", "content": content}]
        body = {"model": self._model, "messages": messages, **request}

        def read_choice(reply: Any) -> tuple[str, bool]:
            choice = reply["choices"][0]
            content = choice["message"]["content"] or ""
            if not isinstance(content, str):
                raise TypeError(f"content is {type(content).__name__}, not text")
            return content, choice.get("finish_reason") == "length"

        async def complete() -> tuple[str, bool]:
            async with self._slots:
                return await self._request_json("POST", "/chat/completions", read_choice, body)

        return await request_service(self._url, complete, RewardInfraError)

    async def _request_json(
        self, method: str, path: str, read: Callable[[Any], T], body: Any = None
    ) -> T:
        """Send a request, and read the JSON of the reply.

        A request without a body is the first one, which shows whether key and model are right.
        """
        import httpx

        is_start = body is None
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.request(method, self._url + path, json=body)
        except TimeoutError:
            # A request may be slow because of its text; a server that answers nobody is out.
            kind: type[StreamError] = RewardTimeoutError
            if await is_silent(self._url):
                kind = ServiceOutageError
            raise kind(f"{self._url}: no answer in {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            kind = ServiceOutageError if is_outage(error) else RewardInfraError
            raise kind(self._redact_message(f"{type(error).__name__}: {error}")) from None
        if not response.is_success:
            raise self._to_reward_error(response, is_start=is_start)
        try:
            return read(response.json())
        except (LookupError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RewardInfraError(f"{self._url}: invalid response: {reason}") from None
        except ValueError as error:
            # A page instead of JSON comes from a proxy whose server is away.
            kind = RewardInfraError if is_start else ServiceOutageError
            raise kind(f"{self._url}: invalid response: {error}") from None

    def _to_reward_error(self, response: "httpx.Response", *, is_start: bool) -> StreamError:
        status, reason = response.status_code, response.text
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            reply = response.json()
            reason = reply.get("error", reply)["message"]
        message = self._redact_message(f"{status}: {reason or response.reason_phrase}")
        is_server_error = status >= FIRST_SERVER_ERROR
        refuses_all = not is_start and (is_server_error or status in REFUSALS_OF_ALL)
        if not (refuses_all or is_server_error or status in TRANSIENT_STATUSES):
            return RewardError(message)
        wait_s = parse_retry_after(response.headers.get("retry-after", ""))
        if wait_s is None and status == TOO_MANY_REQUESTS:
            wait_s = BUSY_WAIT_S
        if wait_s is None and not refuses_all and status not in UNAVAILABLE_STATUSES:
            return RewardInfraError(message)
        outage = ServiceOutageError(message)
        outage.is_answer = is_server_error and status not in UNAVAILABLE_STATUSES
        outage.retry_after_s = 0.0 if wait_s is None else max(wait_s, MIN_RETRY_WAIT_S)
        return outage

    def _redact_message(self, text: str) -> str:
        """Return an error message on a single line, with the URL and without the API key."""
        line = " ".join(f"{self._url}: {text}".split())
        return (line.replace(self._api_key, "***") if self._api_key else line)[:MAX_ERROR_CHARS]

    async def close(self) -> None:
        await self._client.aclose()


def parse_retry_after(header: str) -> float | None:
    """Parse a retry-after header in seconds; None if absent, or an HTTP date."""
    try:
        return max(0.0, float(header))
    except ValueError:
        return None


PLACEHOLDER = re.compile(r"\{(prompt|completion|ground_truth)\}")
MAX_DETAIL_CHARS = 300
"""Characters from the end of a judge's response kept in RewardResult.detail."""


@dataclass
class JudgeOptions(RetryOptions):
    """Options of kind judge; `attempts` counts requests per completion.

    url: base URL of the API, such as http://localhost:8000/v1.
    model: name of the model on the server.
    template: prompt of the judge, with {completion} and optionally {prompt} and {ground_truth}.
    pattern: regular expression of the number in the response: first group of the last match.
    least: lowest valid number; a number outside [least, most] is an invalid response.
    most: highest valid number.
    pass_score: lowest number that passes; null: most.
    temperature: sampling temperature of the judge.
    max_tokens: limit of the response, tokens.
    request: further fields of the chat completion request.
    api_key_env: name of the environment variable with the API key; empty: no key.
    concurrency: concurrent requests per scorer.
    """

    url: str = MISSING
    model: str = MISSING
    template: str = MISSING
    pattern: str = MISSING
    least: float = 0.0
    most: float = 1.0
    pass_score: float | None = None
    temperature: Annotated[float, at_least(0)] = 0.0
    max_tokens: Annotated[int, at_least(1)] = 512
    request: dict[str, Any] = field(default_factory=dict)
    api_key_env: str = ""
    concurrency: Annotated[int, at_least(1)] = 32

    def __post_init__(self) -> None:
        conflicts = (
            (
                not re.match(r"https?://[^/]", self.url),
                "url",
                "must begin with http:// or https://",
            ),
            (
                not -math.inf < self.least < self.most < math.inf,
                "least",
                f"must be below most={self.most}, both finite",
            ),
        )
        check_conflicts(self, conflicts)
        if "{completion}" not in self.template:
            raise ConfigError("template: must contain {completion}")


class JudgeReward(Reward):
    """Sends a request to the judge per completion; requests of a group run concurrently.

    Raises ConfigError for an unusable pattern or API key.
    """

    def __init__(self, spec: RewardSpec[JudgeOptions]) -> None:
        super().__init__()
        self._options = options = spec.options
        self._key = spec.key
        self._api_key = _load_api_key(options.api_key_env, spec.key)
        self._pattern = AnswerPattern(options.pattern, f"{spec.key}.pattern")
        self._pass_score = options.most if options.pass_score is None else options.pass_score
        self._scorer_config = spec.context.scorer
        self._request_fields = {
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            **options.request,
        }
        self._client: ChatClient | None = None

    def validate_prompt(self, prompt: Prompt) -> None:
        if "{ground_truth}" in self._options.template and prompt.ground_truth is None:
            raise RewardError("the template has {ground_truth}, the row has none")

    async def run_preflight(self) -> str:
        """Wait for the server. Raises ConfigError if the server stays down or lacks the model."""
        client = self._make_client()
        try:
            await client.wait_until_ready()
        finally:
            await client.close()
        return ""

    async def start(self) -> None:
        """Create the client. Does not contact the server: requests are retried in an outage."""
        self._client = self._make_client()

    def _make_client(self) -> ChatClient:
        options = self._options
        return ChatClient(
            options.url.rstrip("/"),
            options.model,
            self._api_key,
            concurrency=options.concurrency,
            timeout_s=options.timeout_s or self._scorer_config.timeout_s,
            entry=self._key,
        )

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        """Judge each completion. The first RewardError cancels the other requests of the group."""
        self.validate_prompt(prompt)
        template, texts = self._options.template, [_write_completion(c, part) for c in completions]
        requests = [_fill_template(template, prompt, text) for text in texts]
        return await map_concurrently(
            lambda text: retry_infra_errors(lambda: self._judge_once(text), self._options.attempts),
            requests,
            most=len(requests),
        )

    async def _judge_once(self, text: str) -> RewardResult:
        """Request a judgment. Raises RewardInfraError for a response cut or without a number."""
        assert self._client is not None
        response, is_cut = await self._client.request_completion(text, self._request_fields)
        # In a thread: a regular expression may take up to SEARCH_TIMEOUT_S.
        number = await asyncio.to_thread(self._parse_score, response)
        if is_cut:
            # The rest may change the number: "Score: 1" of 10, or a last match that is to come.
            raise RewardInfraError(
                f"the judge's response was cut at {self._key}.max_tokens="
                f"{self._options.max_tokens}; raise it: {response[-100:]!r}"
            )
        if number is None:
            raise RewardInfraError(
                f"{self._key}.pattern matches no number from {self._options.least:g} to"
                f" {self._options.most:g} in the judge's response: {response[-100:]!r}"
            )
        detail = response[-MAX_DETAIL_CHARS:]
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


def _load_api_key(name: str, entry: str) -> str:
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise ConfigError(
            f"{entry}.api_key_env={name}: this environment variable is not set, or empty"
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
