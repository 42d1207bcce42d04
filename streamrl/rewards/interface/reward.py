"""Base class of rewards, and two implementations: in-process rules and worker processes."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from streamrl.errors import (
    RewardCrashError,
    RewardError,
    RewardInfraError,
    RewardMemoryError,
    RewardRaisedError,
    RewardTimeoutError,
    ServiceOutageError,
)
from streamrl.files.typed_settings import above, at_least
from streamrl.messages import Prompt
from streamrl.rewards.interface.answers import PatternTimeoutError
from streamrl.rewards.interface.completion import Completion
from streamrl.rewards.interface.config import SandboxConfig, ScorerConfig
from streamrl.user_code.pool.pool import (
    PoolSettings,
    WorkerCrashError,
    WorkerError,
    WorkerMemoryError,
    WorkerPool,
    WorkerTimeoutError,
)
from streamrl.user_code.reward_result import RewardOutcome, RewardResult
from streamrl.user_code.service_gate import Outage, request_service

T = TypeVar("T")
OptionsT = TypeVar("OptionsT")
RowFunction = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[float]]]
"""Computes a number for each row of token ids."""

BACKOFF_S = 0.25
"""Retry backoff: attempt n + 1 waits BACKOFF_S * 2^n * uniform(0.5, 1.5) seconds."""


@dataclass(frozen=True)
class RewardContext:
    """Config sections that every reward receives, and the scorer's ranks.

    compute_logits: has the ranks compute the logit of each row of token ids; None where a model is
    whole in this process.
    """

    scorer: ScorerConfig = field(default_factory=ScorerConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    compute_logits: RowFunction | None = None


@dataclass(frozen=True)
class RewardSpec(Generic[OptionsT]):
    """Arguments of a reward's constructor: component name, options and shared config.

    key: config key of the reward's entry, such as costs[1], for messages.
    """

    name: str
    options: OptionsT
    context: RewardContext = field(default_factory=RewardContext)
    key: str = "rewards[0]"


class Reward:
    """Base class of rewards: a reward scores the completions of a prompt.

    kill_counts: number of killed processes by cause.
    model_bytes: bytes of model weights loaded into this process. A reward with model_bytes > 0 uses
        a GPU if available.
    """

    def __init__(self) -> None:
        self.kill_counts: Counter[str] = Counter()
        self.model_bytes = 0

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError if the prompt lacks data that the reward needs."""

    async def run_preflight(self) -> str:
        """Check requirements before a run; return a note or "". Raises ConfigError."""
        return ""

    async def start(self) -> None:
        """Start processes and load models. Raises ConfigError or RewardError."""

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        """Return a result per completion, of which the reward reads one of COMPLETION_PARTS.

        Raises RewardError: a failure is never a score of 0.
        """
        return await self.score(prompt, [completion.get_part(part) for completion in completions])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """Return a result per text; raises as `score_completions`, which calls it, does."""
        raise NotImplementedError

    async def close(self) -> None:
        """End all processes and release all resources."""


class RuleReward(Reward):
    """Reward that is a pure function of completion and ground truth, run in a thread.

    A completion on which a regular expression exceeds its deadline has outcome TIMEOUT.
    judge: returns the result of (completion, ground truth).
    check_truth: raises RewardError for a ground truth that `judge` cannot use.
    """

    def __init__(
        self,
        judge: Callable[[str, Any], RewardResult],
        check_truth: Callable[[Any], object] = lambda truth: None,
    ) -> None:
        super().__init__()
        self._judge_completion = judge
        self._validate_truth = check_truth

    def validate_prompt(self, prompt: Prompt) -> None:
        self._validate_truth(prompt.ground_truth)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        self._validate_truth(prompt.ground_truth)
        judge = partial(self._judge_with_timeout, truth=prompt.ground_truth)
        return await asyncio.to_thread(lambda: [*map(judge, completions)])

    def _judge_with_timeout(self, completion: str, truth: Any) -> RewardResult:
        try:
            return self._judge_completion(completion, truth)
        except PatternTimeoutError as error:
            return RewardResult(0.0, RewardOutcome.TIMEOUT, detail=str(error))


@dataclass
class RetryOptions:
    """Retry options of rewards that depend on a server, a worker process or a model.

    attempts: attempts to score a group before the group is dropped.
    timeout_s: deadline of one attempt, s; null: scorer.timeout_s.
    """

    attempts: Annotated[int, at_least(1)] = 3
    timeout_s: Annotated[float | None, above(0)] = None


@dataclass
class WorkerOptions(RetryOptions):
    """Options of a reward that runs in worker processes.

    replicas: processes per scorer.
    concurrency: groups that a process scores concurrently, if the reward is async.
    memory_gib: memory limit of a process including its children, GiB.
    """

    replicas: Annotated[int, at_least(1)] = 2
    concurrency: Annotated[int, at_least(1)] = 16
    memory_gib: Annotated[float, above(0)] = 4.0


_REWARD_ERRORS: dict[type[WorkerError], type[RewardInfraError]] = {
    WorkerTimeoutError: RewardTimeoutError,
    WorkerCrashError: RewardCrashError,
    WorkerMemoryError: RewardMemoryError,
}


class WorkerReward(Reward):
    """Reward computed in worker processes that can be killed.

    target: "module:function"; a worker calls this function with `payload` to get its handler. The
        handler maps a request, by default (prompt, texts), to a list of results, to a string: the
        error message of an invalid result, which is not retried; or to the Outage of a service,
        which is waited for.
    spec: its options are WorkerOptions.
    """

    def __init__(self, target: str, payload: Any, spec: RewardSpec[Any]) -> None:
        super().__init__()
        options: WorkerOptions = spec.options
        self._name, self.attempts = spec.name, options.attempts
        settings = PoolSettings(
            options.replicas,
            options.concurrency,
            timeout_s=options.timeout_s or spec.context.scorer.timeout_s,
            memory_bytes=int(options.memory_gib * 2**30),
        )
        self._make_pool = partial(WorkerPool, f"reward {spec.name}", target, payload)
        self._pool, self._settings = self._make_pool(settings), settings
        self.kill_counts = self._pool.kill_counts

    async def start(self) -> None:
        try:
            await self._pool.start()
        except WorkerCrashError as error:
            raise RewardCrashError(str(error)) from None

    async def probe_worker(self) -> Any:
        """Return the response of a temporary worker to None: the FunctionCallSpec of a function."""
        pool = self._make_pool(replace(self._settings, replicas=1))
        try:
            await pool.start()
            return await pool.call(None)
        except WorkerError as error:
            raise RewardCrashError(str(error)) from None
        finally:
            await pool.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        return await self.score_request((prompt, list(completions)))

    async def score_request(self, request: Any) -> Sequence[RewardResult]:
        """Have a worker's handler score a group, with retries.

        Raises the error of the last attempt; raises RewardError for an invalid result at once.
        """
        attempt = itertools.count()

        async def attempt_once() -> list[RewardResult]:
            # A request that failed before runs on an exclusive worker.
            call = partial(self.call_once, request, exclusive=next(attempt) > 0)
            return await request_service(self._name, call, RewardInfraError)

        return await retry_infra_errors(attempt_once, self.attempts)

    async def call_once(self, request: Any, *, exclusive: bool = False) -> Any:
        """Run a request in a worker once. Raises RewardError for a failure or a text response, and
        ServiceOutageError.

        exclusive: use a worker that runs nothing else.
        """
        try:
            answer = await self._pool.call(request, exclusive=exclusive)
        except WorkerError as failure:
            raise _REWARD_ERRORS.get(type(failure), RewardRaisedError)(str(failure)) from None
        if isinstance(answer, Outage):
            raise ServiceOutageError(answer.reason)
        if isinstance(answer, str):
            raise RewardError(answer)
        return answer

    async def close(self) -> None:
        await self._pool.close()


async def retry_infra_errors(call: Callable[[], Awaitable[T]], attempts: int) -> T:
    """Await call(), up to `attempts` times on RewardInfraErrors, with exponential backoff."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return await call()
        except RewardInfraError as error:
            if attempt == attempts:
                times = f", tried {attempt} times" if attempt > 1 else ""
                raise type(error)(f"{error}{times}") from error
            # Jitter: requests that failed together in an overload must not return together.
            await asyncio.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
