"""Kinds that are rules of matchers/: gsm8k, math, symbolic, choice, tags and so on."""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamrl.errors import RewardMemoryError, RewardTimeoutError
from streamrl.messages import Prompt
from streamrl.rewards.interface.reward import (
    Reward,
    RewardSpec,
    RuleReward,
    WorkerOptions,
    WorkerReward,
    retry_infra_errors,
)
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult
from streamrl.rewards.matchers import MATCHERS, find_matcher
from streamrl.rewards.matchers.choice import LETTERS

_LIMIT_ATTEMPTS = 2
"""A completion that is judged too slowly may be bad luck once; twice, it is its own doing."""


@dataclass
class EmptyRewardOptions:
    """Of a kind that has none."""


@dataclass
class Gsm8kOptions:
    """Options of kind gsm8k.

    method: strict, the number behind "#### "; flexible, the last number.
    """

    method: str = "strict"


@dataclass
class DapoOptions:
    r"""Options of kind dapo_math.

    strict_box: only a \boxed{} is an answer, not what follows "Answer:".
    """

    strict_box: bool = False


@dataclass
class ChoiceOptions:
    """Options of kind choice.

    letters: those to choose from.
    """

    letters: str = LETTERS


@dataclass
class TagsOptions:
    """Options of kind tags.

    tags: each opened and closed once, in this order, around more than spaces.
    nothing_outside: there is nothing but spaces before, between and behind them.
    """

    tags: list[str] = field(default_factory=lambda: ["think", "answer"])
    nothing_outside: bool = True


@dataclass
class LengthOptions:
    """Options of kind length.

    unit: words or characters.
    least: from so many on the score is 1.
    most: up to so many it is.
    tolerance: over so many beyond these it falls to 0.
    """

    unit: str = "words"
    least: int = 0
    most: float = math.inf
    tolerance: int = 0


@dataclass
class SymbolicOptions(WorkerOptions):
    """Options of kind symbolic, and of kind auto for sources that are judged so.

    timeout_s: deadline of one completion, s; one that takes longer twice is judged timeout.
    """

    timeout_s: float | None = 5.0
    memory_gib: float = 1.0


def build_rule_reward(name: str, given: RewardSpec[Any]) -> RuleReward:
    """The rule of a name. Raises ConfigError for an option it refuses."""
    rule, options = MATCHERS[name], dataclasses.asdict(given.options)
    # A wrong option is refused whatever is judged; this truth is one that every rule can use.
    rule.judge_completion("", "A" if name == "choice" else "0", **options)
    check = partial(rule.validate_truth, **options) if name == "choice" else rule.validate_truth
    return RuleReward(partial(rule.judge_completion, **options), check)


class SymbolicReward(WorkerReward):
    """Each completion in a worker: working out what one says can take forever, or all memory.

    That is a verdict on the completion, as it is on a program: nothing is retried for it but once.
    """

    def __init__(self, given: RewardSpec[SymbolicOptions]) -> None:
        super().__init__("streamrl.rewards.kinds.rules:make_symbolic_handler", None, given)

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError for a ground truth that is neither text nor an int."""
        MATCHERS["symbolic"].validate_truth(prompt.ground_truth)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """What math-verify says of each. Raises RewardError."""
        truth = prompt.ground_truth
        return await asyncio.gather(*(self._judge_completion(truth, text) for text in completions))

    async def _judge_completion(self, truth: Any, completion: str) -> RewardResult:
        mishaps = 0

        async def once() -> RewardResult:
            nonlocal mishaps
            try:
                judgement: RewardResult = await self._call_once((truth, completion))
                return judgement
            except (RewardTimeoutError, RewardMemoryError) as error:
                mishaps += 1
                if mishaps < _LIMIT_ATTEMPTS:
                    raise
                is_late = isinstance(error, RewardTimeoutError)
                verdict = RewardOutcome.TIMEOUT if is_late else RewardOutcome.MEMORY
                return RewardResult(0.0, verdict, detail=str(error))

        found: RewardResult = await retry_infra_errors(once, max(self._attempts, _LIMIT_ATTEMPTS))
        return found


def make_symbolic_handler(_: None) -> Callable[[Any], RewardResult]:
    """What a worker answers with."""
    # Loaded before the first deadline runs.
    import math_verify  # noqa: F401

    judge = MATCHERS["symbolic"].judge_completion

    def answer(request: tuple[Any, str]) -> RewardResult:
        truth, completion = request
        return judge(completion, truth)

    return answer


class AutoReward(Reward):
    """Judges each row by the rule of its data_source."""

    def __init__(self, given: RewardSpec[SymbolicOptions]) -> None:
        super().__init__()
        self._symbolic_reward = SymbolicReward(given)
        self.kill_counts = self._symbolic_reward.kill_counts

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError for a source that has no rule, or a ground truth it cannot use."""
        find_matcher(prompt.data_source).validate_truth(prompt.ground_truth)

    async def start(self) -> None:
        """Start a worker for what may hang."""
        await self._symbolic_reward.start()

    async def close(self) -> None:
        """End it."""
        await self._symbolic_reward.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        """What the source's rule says of each completion."""
        rule = find_matcher(prompt.data_source)
        if rule.may_hang:
            return await self._symbolic_reward.score(prompt, completions)
        return await RuleReward(rule.judge_completion, rule.validate_truth).score(
            prompt, completions
        )
