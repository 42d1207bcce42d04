"""Kind `judge`: a number that a language model gives in words, asked over an OpenAI-compatible API.

vLLM's own server speaks it.
"""

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
from streamrl.rewards.interface.extract import AnswerPattern
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult

if TYPE_CHECKING:
    from streamrl.rewards.kinds.openai_client import ChatClient

PLACEHOLDER = re.compile(r"\{(prompt|completion|ground_truth)\}")
"""What stands in a template for a text."""
BYTES_PER_TOKEN = 3
"""Of what is sent, for tokens_per_minute: most texts have more bytes to a token."""
MAX_DETAIL_CHARS = 300
"""Most characters of an answer that are kept with a judgement: its end."""


@dataclass
class JudgeOptions(RetryOptions):
    """Options of kind judge; each completion has its own attempts, a request each.

    url: of the server's API, such as http://localhost:8000/v1.
    model: its name there.
    template: what the judge is asked, with {completion} and, where wanted, {prompt} and
        {ground_truth} in it.
    path: a file that holds the template instead.
    pattern: where the number stands in the answer: its last match, first group.
    least: the lowest number there is; one outside is no answer.
    most: the highest.
    pass_score: from here on a completion passes; null: most.
    temperature: the judge's.
    max_tokens: most tokens of its answer.
    request: what else the server is told, fields of a chat completion request.
    api_key_env: name of the environment variable that holds the key; empty: no key.
    concurrency: requests at once, of each scorer.
    requests_per_minute: of all scorers together; 0: no limit.
    tokens_per_minute: likewise, of what is sent (estimated) and max_tokens; 0: no limit.
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
            raise ConfigError("template: give it, or path, and not both")
        if not -math.inf < self.least < self.most < math.inf:
            raise ConfigError(f"least={self.least}: must be below most={self.most}, both finite")
        for key in ("max_tokens", "concurrency"):
            if vars(self)[key] < 1:
                raise ConfigError(f"{key}={vars(self)[key]}: must be 1 or more")
        for key in ("temperature", "requests_per_minute", "tokens_per_minute"):
            if not 0 <= vars(self)[key] < math.inf:
                raise ConfigError(f"{key}={vars(self)[key]}: must be 0 or more, and finite")


class JudgeReward(Reward):
    """Asks about each completion by itself, all of a group side by side."""

    def __init__(self, template: str, key: str, given: RewardSpec[JudgeOptions]) -> None:
        """`key` is the server's, or empty. Raises ConfigError for a pattern that is wrong."""
        super().__init__()
        self._options = options = given.options
        self._template = template
        self._api_key = key
        self._pattern = AnswerPattern(options.pattern)
        self._pass_score = options.most if options.pass_score is None else options.pass_score
        self._scorer_config = given.context.scorer
        self._request_fields = {
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "extra_body": options.request,
        }
        self._client: ChatClient | None = None

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError if the template wants a ground truth and the row has none."""
        if "{ground_truth}" in self._template and prompt.ground_truth is None:
            raise RewardError("the template has {ground_truth}, the row has none")

    async def run_preflight(self) -> str:
        """Wait for the server. Raises ConfigError if it does not come, or cannot be used."""
        endpoint = self._make_client()
        try:
            return await endpoint.wait_until_ready()
        finally:
            await endpoint.close()

    async def start(self) -> None:
        """Nothing is asked: where the server is away for a while, completions have attempts."""
        self._client = self._make_client()

    def _make_client(self) -> "ChatClient":
        from streamrl.rewards.kinds.openai_client import ChatClient, RequestLimits

        options, share = self._options, 1 / self._scorer_config.replicas
        limits = RequestLimits(
            options.concurrency,
            options.requests_per_minute * share,
            options.tokens_per_minute * share,
            options.timeout_s or self._scorer_config.timeout_s,
        )
        return ChatClient(options.url.rstrip("/"), options.model, self._api_key, limits)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """What the judge says of each. Raises the error of the first that gets no number."""
        self.validate_prompt(prompt)
        tasks = [
            asyncio.create_task(
                self._judge_text(_fill_template(self._template, prompt, completion))
            )
            for completion in completions
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _judge_text(self, text: str) -> RewardResult:
        found: RewardResult = await retry_infra_errors(
            lambda: self._judge_once(text), self._options.attempts
        )
        return found

    async def _judge_once(self, text: str) -> RewardResult:
        assert self._client is not None
        size = len(text.encode("utf-8", "replace"))
        answer = await self._client.request_completion(
            text,
            tokens=size // BYTES_PER_TOKEN + 1 + self._options.max_tokens,
            request=self._request_fields,
        )
        # Beside the event loop: a pattern may take its time.
        number = await asyncio.to_thread(self._parse_score, answer.text)
        if number is None:
            cut = f", cut at max_tokens={self._options.max_tokens}" if answer.is_truncated else ""
            raise RewardInfraError(
                f"the judge's answer has no number from {self._options.least:g} to"
                f" {self._options.most:g} where the pattern looks{cut}: {answer.text[-100:]!r}"
            )
        verdict = RewardOutcome.PASS if number >= self._pass_score else RewardOutcome.WRONG
        return RewardResult(number, verdict, detail=answer.text[-MAX_DETAIL_CHARS:])

    def _parse_score(self, answer: str) -> float | None:
        """The number in an answer; None where there is none that it may be."""
        try:
            number = float(self._pattern.find_last(answer) or "")
        except ValueError:
            return None
        return number if self._options.least <= number <= self._options.most else None

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.close()


def build_judge_reward(given: RewardSpec[JudgeOptions]) -> JudgeReward:
    """Kind `judge`. Raises ConfigError for a template, pattern or key that cannot be had."""
    options = given.options
    setting, template = "rewards.template", options.template
    if options.path:
        setting = f"rewards.path={options.path}"
        try:
            template = read_small_text(Path(options.path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: cannot be read: {error}") from None
    if "{completion}" not in template:
        raise ConfigError(f"{setting}: has no {{completion}}: the judge would not see it")
    key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
    if options.api_key_env and not key:
        raise ConfigError(
            f"rewards.api_key_env={options.api_key_env}: the environment has no such variable, or"
            " an empty one"
        )
    return JudgeReward(template, key, given)


def _fill_template(template: str, prompt: Prompt, completion: str) -> str:
    """The template with its texts. What a text holds, braces too, stays as it is: one pass."""
    texts = {
        "prompt": _render_conversation(prompt.messages),
        "completion": completion,
        "ground_truth": _to_text(prompt.ground_truth),
    }
    return PLACEHOLDER.sub(lambda found: texts[found[1]], template)


def _render_conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """What a single message says, or who says what in several."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _to_text(truth: Any) -> str:
    return truth if isinstance(truth, str) else json.dumps(truth, default=str, ensure_ascii=False)
