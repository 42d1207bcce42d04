"""Kind `judge`: LLM as a judge behind an OpenAI-compatible API, such as a vLLM server."""

import asyncio
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from streamrl.errors import ConfigError, RewardError, RewardInfraError
from streamrl.files.bounded_read import read_small_text
from streamrl.messages import Prompt
from streamrl.rewards.interface.completion import CONVERSATION, Completion
from streamrl.rewards.interface.extract import AnswerPattern
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.rewards.interface.reward_result import RewardResult

if TYPE_CHECKING:
    from streamrl.rewards.kinds.openai_client import ChatClient

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
        for key in ("max_tokens", "concurrency"):
            if vars(self)[key] < 1:
                raise ConfigError(f"{key}={vars(self)[key]}: must be 1 or more")
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
        from streamrl.rewards.kinds.openai_client import ChatClient, RequestLimits

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
