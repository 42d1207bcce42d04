"""What every reward is, and the two ways most are made: a rule, or calls of worker processes."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from streamrl.errors import (
    ConfigError,
    RewardCrashError,
    RewardError,
    RewardInfraError,
    RewardMemoryError,
    RewardRaisedError,
    RewardTimeoutError,
)
from streamrl.messages import Prompt
from streamrl.process_pool import (
    WorkerCrashError,
    WorkerError,
    WorkerMemoryError,
    WorkerPool,
    WorkerPoolSettings,
    WorkerTimeoutError,
)
from streamrl.rewards.interface.config import SandboxConfig, ScorerConfig
from streamrl.rewards.interface.extract import PatternTimeoutError
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult

OptionsT = TypeVar("OptionsT")

BACKOFF_S = 0.25
"""Half of the mean wait before the second attempt, which is doubled for each one after it, s."""


@dataclass(frozen=True)
class RewardContext:
    """Settings that rewards read besides their own."""

    scorer: ScorerConfig = field(default_factory=ScorerConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


@dataclass(frozen=True)
class RewardSpec(Generic[OptionsT]):
    """What a reward is made of: the name of its component, its options, and the other settings."""

    name: str
    options: OptionsT
    context: RewardContext = field(default_factory=RewardContext)


class Reward:
    """One way to judge the completions of a prompt.

    killed: processes ended for it, by cause. model_bytes: weights of the model it asks in its own
    process, 0 without one; with one it takes a GPU where there are any.
    """

    def __init__(self) -> None:
        self.kill_counts: Counter[str] = Counter()
        self.model_bytes = 0

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError if this prompt's row lacks what the reward needs."""

    async def run_preflight(self) -> str:
        """What the user should know before a run starts with this reward; empty: nothing.

        Raises ConfigError for what cannot be had on this machine.
        """
        return ""

    async def start(self) -> None:
        """Make ready what judging takes. Raises ConfigError, or RewardError, if that fails."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """One judgement per completion, or RewardError. Never 0 for what went wrong."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave nothing behind."""


class RuleReward(Reward):
    """A rule: text and ground truth in, a judgement out. Runs beside the event loop.

    A completion that a pattern of the rule takes too long on is judged timeout.
    """

    def __init__(
        self,
        judge: Callable[[str, Any], RewardResult],
        check_truth: Callable[[Any], object] = lambda truth: None,
    ) -> None:
        """`check_truth` raises RewardError for a ground truth the rule cannot use."""
        super().__init__()
        self._judge_completion = judge
        self._validate_truth = check_truth

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError for a ground truth the rule cannot use."""
        self._validate_truth(prompt.ground_truth)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """What the rule says of each completion."""
        return await asyncio.to_thread(self._judge_completions, prompt.ground_truth, completions)

    def _judge_completions(self, truth: Any, completions: Sequence[str]) -> list[RewardResult]:
        self._validate_truth(truth)
        return [self._judge_with_timeout(text, truth) for text in completions]

    def _judge_with_timeout(self, completion: str, truth: Any) -> RewardResult:
        try:
            return self._judge_completion(completion, truth)
        except PatternTimeoutError as error:
            return RewardResult(0.0, RewardOutcome.TIMEOUT, detail=str(error))


@dataclass
class RetryOptions:
    """Of a reward that may fail for reasons that are not the completion's.

    attempts: times it is tried for a group before the group is dropped.
    timeout_s: deadline of one attempt, s; null: scorer.timeout_s.
    """

    attempts: int = 3
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts}: must be 1 or more")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: must be above 0")


@dataclass
class WorkerOptions(RetryOptions):
    """Of a reward that is computed in processes of its own.

    replicas: processes of each scorer.
    concurrency: groups at once in a process, if the reward is async.
    memory_gib: most a process may take, with all it started, GiB.
    """

    replicas: int = 2
    concurrency: int = 16
    memory_gib: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("replicas", "concurrency"):
            if vars(self)[key] < 1:
                raise ConfigError(f"{key}={vars(self)[key]}: must be 1 or more")
        if self.memory_gib <= 0:
            raise ConfigError(f"memory_gib={self.memory_gib}: must be above 0")


_REWARD_ERRORS: dict[type[WorkerError], type[RewardInfraError]] = {
    WorkerTimeoutError: RewardTimeoutError,
    WorkerCrashError: RewardCrashError,
    WorkerMemoryError: RewardMemoryError,
}


class WorkerReward(Reward):
    """A reward whose judging happens in worker processes that can be killed.

    `target`, "module:function", makes of `payload` what answers (prompt, completions) with a list
    of judgements, or with text: why what it computed is no judgement.
    """

    def __init__(self, target: str, payload: Any, given: RewardSpec[Any]) -> None:
        """The options are WorkerOptions."""
        super().__init__()
        options: WorkerOptions = given.options
        self._attempts = options.attempts
        settings = WorkerPoolSettings(
            replicas=options.replicas,
            concurrency=options.concurrency,
            timeout_s=options.timeout_s or given.context.scorer.timeout_s,
            memory_bytes=int(options.memory_gib * 2**30),
        )
        self._make_pool = partial(WorkerPool, given.name, target, payload, settings)
        self._pool = self._make_pool()
        self.kill_counts = self._pool.kill_counts

    async def start(self) -> None:
        """Start a worker: what it cannot load is told now."""
        await _start_pool(self._pool)

    async def probe_worker(self) -> Any:
        """What a worker answers to the request None, one that is started only for that."""
        pool = self._make_pool()
        try:
            await _start_pool(pool)
            return await pool.call(None)
        except WorkerError as error:
            raise RewardCrashError(str(error)) from None
        finally:
            await pool.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """What a worker says. Raises RewardError after so many attempts, or at once for nonsense.

        What kind of error is that of the last attempt.
        """
        found: list[RewardResult] = await self.call_worker((prompt, list(completions)))
        return found

    async def call_worker(self, request: Any) -> Any:
        """What a worker answers to a request."""
        made = itertools.count()
        # What has failed before does not share a worker any more.
        return await retry_infra_errors(
            lambda: self._call_once(request, alone=next(made) > 0),
            self._attempts,
        )

    async def _call_once(self, request: Any, *, alone: bool = False) -> Any:
        try:
            answer = await self._pool.call(request, alone=alone)
        except WorkerError as failure:
            raise _REWARD_ERRORS.get(type(failure), RewardRaisedError)(str(failure)) from None
        if isinstance(answer, str):
            raise RewardError(answer)
        return answer

    async def close(self) -> None:
        """End all workers."""
        await self._pool.close()


async def _start_pool(pool: WorkerPool) -> None:
    try:
        await pool.start()
    except WorkerCrashError as error:
        raise RewardCrashError(f"its worker does not start: {error}") from None


async def retry_infra_errors(once: Callable[[], Any], attempts: int) -> Any:
    """What `unique_names()` gives, tried so many times as long as it raises InfraError, with
    growing waits.

    Any other error is raised at once.
    """
    for made in range(1, attempts + 1):
        try:
            return await once()
        except RewardInfraError as error:
            if made == attempts:
                times = f", tried {made} times" if made > 1 else ""
                raise type(error)(f"{error}{times}") from error
            # Apart from each other: what failed together may have failed of too much at once.
            await asyncio.sleep(BACKOFF_S * 2**made * random.uniform(0.5, 1.5))
