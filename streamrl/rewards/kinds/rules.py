"""Kinds backed by answer matchers: gsm8k, math, dapo_math, symbolic, choice, tags, length, auto."""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamrl.messages import Prompt
from streamrl.rewards.interface.reward import (
    CompletionWorkerReward,
    Reward,
    RewardSpec,
    RuleReward,
    WorkerOptions,
)
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.choice import LETTERS
from streamrl.rewards.matchers.matcher_table import MATCHERS, find_matcher


@dataclass
class EmptyRewardOptions:
    """Options of reward kinds without options."""


@dataclass
class Gsm8kOptions:
    """Options of kind gsm8k.

    method: strict: the number after "#### "; flexible: the last number.
    """

    method: str = "strict"


@dataclass
class DapoOptions:
    r"""Options of kind dapo_math.

    strict_box: only \boxed{} is an answer, text after "Answer:" is not.
    """

    strict_box: bool = False


@dataclass
class ChoiceOptions:
    """Options of kind choice.

    letters: the choices.
    """

    letters: str = LETTERS


@dataclass
class TagsOptions:
    """Options of kind tags.

    tags: tags that must be opened and closed once, in this order, with content.
    nothing_outside: allow only whitespace outside the tags.
    """

    tags: list[str] = field(default_factory=lambda: ["think", "answer"])
    nothing_outside: bool = True


@dataclass
class LengthOptions:
    """Options of kind length.

    unit: words or characters.
    least: shortest length with score 1.
    most: longest length with score 1.
    tolerance: distance outside these bounds within which the score falls to 0.
    """

    unit: str = "words"
    least: int = 0
    most: float = math.inf
    tolerance: int = 0


@dataclass
class SymbolicOptions(WorkerOptions):
    """Options of kind symbolic, and of kind auto for data sources with the symbolic matcher.

    timeout_s: deadline of one completion, s; after two timeouts the outcome is timeout.
    """

    timeout_s: float | None = 5.0
    memory_gib: float = 1.0


def build_rule_reward(name: str, spec: RewardSpec[Any]) -> RuleReward:
    """Build the reward of the matcher called `name`. Raises ConfigError for a wrong option."""
    rule, options = MATCHERS[name], dataclasses.asdict(spec.options)
    # A trial call raises ConfigError for wrong options. Every matcher accepts this truth.
    rule.judge_completion("", "A" if name == "choice" else "0", **options)
    check = partial(rule.validate_truth, **options) if name == "choice" else rule.validate_truth
    return RuleReward(partial(rule.judge_completion, **options), check)


class SymbolicReward(CompletionWorkerReward):
    """Scores completions with math-verify: parsing one may take forever or all memory."""

    def __init__(self, spec: RewardSpec[SymbolicOptions]) -> None:
        super().__init__("streamrl.rewards.kinds.rules:make_symbolic_handler", None, spec)

    def validate_prompt(self, prompt: Prompt) -> None:
        MATCHERS["symbolic"].validate_truth(prompt.ground_truth)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        truth = prompt.ground_truth
        return await asyncio.gather(*(self.judge_completion((truth, text)) for text in completions))


def make_symbolic_handler(_: None) -> Callable[[Any], RewardResult]:
    """Return the handler of a worker of SymbolicReward: (truth, completion) to RewardResult."""
    # Imported here so that the slow import does not count toward the first call's deadline.
    import math_verify  # noqa: F401

    judge = MATCHERS["symbolic"].judge_completion

    def handle_request(request: tuple[Any, str]) -> RewardResult:
        truth, completion = request
        return judge(completion, truth)

    return handle_request


class AutoReward(Reward):
    """Scores each prompt with the default matcher of its data_source."""

    def __init__(self, spec: RewardSpec[SymbolicOptions]) -> None:
        super().__init__()
        self._symbolic_reward = SymbolicReward(spec)
        self.kill_counts = self._symbolic_reward.kill_counts

    def validate_prompt(self, prompt: Prompt) -> None:
        find_matcher(prompt.data_source).validate_truth(prompt.ground_truth)

    async def start(self) -> None:
        await self._symbolic_reward.start()

    async def close(self) -> None:
        await self._symbolic_reward.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        rule = find_matcher(prompt.data_source)
        if rule.may_hang:
            return await self._symbolic_reward.score(prompt, completions)
        return await RuleReward(rule.judge_completion, rule.validate_truth).score(
            prompt, completions
        )
