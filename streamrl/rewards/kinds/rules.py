"""Kinds that judge by a rule: patterns, answer matchers, the score of the environment."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, cast

from omegaconf import MISSING

from streamrl.errors import RewardError, RewardMemoryError, RewardTimeoutError
from streamrl.files.typed_settings import at_least, check_conflicts, one_of
from streamrl.messages import Prompt
from streamrl.rewards.interface.answers import AnswerPattern, parse_truth_text
from streamrl.rewards.interface.completion import Completion
from streamrl.rewards.interface.reward import (
    Reward,
    RewardSpec,
    RuleReward,
    WorkerOptions,
    WorkerReward,
    retry_infra_errors,
)
from streamrl.rewards.kinds import math_answers
from streamrl.rewards.kinds.math_answers import GSM8K_METHODS
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.reward_result import RewardOutcome, RewardResult


@dataclass(frozen=True)
class AnswerMatcher:
    """Scores a completion against a ground truth.

    judge_completion: (completion, truth, **options) -> RewardResult. Raises RewardError for an
        unusable truth; never raises because of the completion, in time linear in its length.
    validate_truth: raises RewardError for an unusable truth.
    """

    judge_completion: Callable[..., RewardResult]
    validate_truth: Callable[[Any], object]


MATCHERS: Mapping[str, AnswerMatcher] = {
    "gsm8k": AnswerMatcher(math_answers.judge_gsm8k, math_answers.validate_gsm8k_truth),
    "math": AnswerMatcher(math_answers.judge_math, math_answers.validate_math_truth),
    "dapo_math": AnswerMatcher(math_answers.judge_dapo_math, math_answers.validate_dapo_math_truth),
}
SYMBOLIC = "symbolic"
KIND_BY_SOURCE: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "dapo_math",
    "math_dapo": "dapo_math",
    "math_dapo_reasoning": "dapo_math",
    "aime*": "dapo_math",
    "numina_*": SYMBOLIC,
}
"""Matcher or SYMBOLIC by pattern of the row's data_source (fnmatch); the first match counts."""


def find_kind(data_source: str) -> str:
    """Return the default rule of a data_source. Raises RewardError without a default."""
    for source, kind in KIND_BY_SOURCE.items():
        if fnmatchcase(data_source, source):
            return kind
    raise RewardError(
        f"data_source {data_source!r} has no default rule; known: {', '.join(KIND_BY_SOURCE)}"
    )


# Bounds on text and exponent protect memory: 1e999999999 as an integer takes 415 MB.
_MAX_CHARACTERS = 1000
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"([+-]?{_DECIMAL})(?:/({_DECIMAL}))?", re.ASCII)


@dataclass
class PatternOptions:
    """Options of reward kinds that compare an answer with the ground truth.

    pattern: regular expression of the answer: first group of the last match; empty: the whole
        completion is the answer.
    """

    pattern: str = ""


@dataclass
class RegexOptions:
    """Options of kind regex.

    pattern: regular expression, searched anywhere in the completion.
    """

    pattern: str = MISSING


def build_exact_reward(spec: RewardSpec[PatternOptions]) -> RuleReward:
    """Build a reward that compares answer and ground truth as stripped texts.

    A completion without a match is wrong. The ground truth is nonempty text or an int.
    """
    pattern = AnswerPattern(spec.options.pattern, f"{spec.key}.pattern")

    def judge(completion: str, truth: Any) -> RewardResult:
        answer = pattern.find_answer(completion)
        return RewardResult.from_correctness(answer == parse_truth_text(truth), answer)

    return RuleReward(judge, parse_truth_text)


def build_numeric_reward(spec: RewardSpec[PatternOptions]) -> RuleReward:
    """Build a reward that compares answer and ground truth as exact numbers.

    0.5, .50, 1/2 and 5e-1 are equal, as are 1,000 and 1000. The whole completion, or the whole
    match of `pattern`, must be a number; a number inside prose is wrong. The ground truth is such a
    text, an int or a float. The float 0.1 means the decimal 0.1, not its binary value.
    """
    pattern = AnswerPattern(spec.options.pattern, f"{spec.key}.pattern")

    def judge(completion: str, truth: Any) -> RewardResult:
        number = parse_number(pattern.find_answer(completion) or "")
        passes = number is not None and number == _parse_truth(truth)
        return RewardResult.from_correctness(passes, None if number is None else str(number))

    return RuleReward(judge, _parse_truth)


def build_regex_reward(spec: RewardSpec[RegexOptions]) -> RuleReward:
    r"""Build a reward that scores 1 if `pattern` matches anywhere in the completion.

    \A and \Z in the pattern anchor it at both ends.
    """
    pattern = AnswerPattern(spec.options.pattern, f"{spec.key}.pattern")
    return RuleReward(lambda text, truth: RewardResult.from_correctness(pattern.has_match(text)))


def parse_number(text: str) -> Fraction | None:
    """Parse a decimal (with exponent or thousands commas) or a fraction; None for other text."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    numerator, denominator = (
        Fraction(part.replace(",", "")) for part in (match[1], match[2] or "1")
    )
    return numerator / denominator if denominator else None


def _parse_truth(truth: Any) -> Fraction:
    number = None
    if isinstance(truth, str | int | float) and not isinstance(truth, bool):
        number = parse_number(str(truth))
    if number is None:
        raise RewardError(f"ground_truth must be a number, is {truth!r}")
    return number


@dataclass
class LengthOptions:
    """Options of kind length.

    unit: words or characters.
    least: shortest length with score 1.
    most: longest length with score 1; null: no limit.
    tolerance: distance outside these bounds within which the score falls to 0.
    """

    unit: Annotated[str, one_of("words", "characters")] = "words"
    least: Annotated[int, at_least(0)] = 0
    most: float | None = None
    tolerance: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        is_empty = self.most is not None and self.most < self.least
        check_conflicts(self, [(is_empty, "most", f"must be at least least={self.least}")])


def build_length_reward(spec: RewardSpec[LengthOptions]) -> RuleReward:
    """Build a reward that scores 1 for a length within [least, most].

    A length outside by n scores max(0, 1 - n / tolerance), or 0 without tolerance.
    """
    options = spec.options
    most = math.inf if options.most is None else options.most

    def judge(completion: str, truth: Any) -> RewardResult:
        length = len(completion.split() if options.unit == "words" else completion)
        beyond = max(options.least - length, length - most, 0)
        score = max(0.0, 1 - beyond / options.tolerance) if options.tolerance else float(not beyond)
        detail = f"{length} {options.unit}"
        return RewardResult.from_correctness(not beyond, score=score, detail=detail)

    return RuleReward(judge)


@dataclass
class EmptyRewardOptions:
    """Options of reward kinds without options."""


@dataclass
class Gsm8kOptions:
    """Options of kind gsm8k.

    method: strict: the number after "#### "; flexible: the last number.
    """

    method: Annotated[str, one_of(*GSM8K_METHODS)] = "strict"


@dataclass
class DapoOptions:
    r"""Options of kind dapo_math.

    strict_box: only \boxed{} is an answer, text after "Answer:" is not.
    """

    strict_box: bool = False


@dataclass
class SymbolicOptions(WorkerOptions):
    """Options of kind symbolic, and of kind auto for data sources with the symbolic matcher.

    timeout_s: deadline of one completion, s; after two timeouts the outcome is timeout.
    """

    timeout_s: float | None = 5.0
    memory_gib: float = 1.0


def build_matcher_reward(name: str, options: Any = None) -> RuleReward:
    """Build the reward of the matcher `name`, whose options are the arguments of its judge."""
    matcher = MATCHERS[name]
    judge = partial(matcher.judge_completion, **vars(options) if options else {})
    return RuleReward(judge, matcher.validate_truth)


_LIMIT_ATTEMPTS = 2
"""Timeouts or memory errors that decide a completion: a busy machine may cause the first."""


class SymbolicReward(WorkerReward):
    """Scores completions with math-verify: parsing one may take forever or all memory.

    A completion that exceeds the deadline or the memory limit twice has outcome TIMEOUT or MEMORY
    and score 0; this is no infrastructure error.
    """

    def __init__(self, spec: RewardSpec[SymbolicOptions]) -> None:
        super().__init__("streamrl.rewards.kinds.symbolic:make_symbolic_handler", None, spec)

    def validate_prompt(self, prompt: Prompt) -> None:
        math_answers.validate_symbolic_truth(prompt.ground_truth)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        requests = [(prompt.ground_truth, text) for text in completions]
        return await map_concurrently(self._judge, requests, most=len(requests))

    async def _judge(self, request: tuple[Any, str]) -> RewardResult:
        """Judge a completion in a worker; judge again after an error.

        The second timeout or memory error, counted together, gives score 0 with that outcome.
        """
        limit_errors = itertools.count(1)

        async def judge_once() -> RewardResult:
            try:
                return cast(RewardResult, await self.call_once(request))
            except (RewardTimeoutError, RewardMemoryError) as error:
                if next(limit_errors) < _LIMIT_ATTEMPTS:
                    raise
                is_timeout = isinstance(error, RewardTimeoutError)
                outcome = RewardOutcome.TIMEOUT if is_timeout else RewardOutcome.MEMORY
                return RewardResult(0.0, outcome, detail=str(error))

        return await retry_infra_errors(judge_once, max(self.attempts, _LIMIT_ATTEMPTS))


class AutoReward(Reward):
    """Scores each prompt with the default rule of its data_source."""

    def __init__(self, spec: RewardSpec[SymbolicOptions]) -> None:
        super().__init__()
        self._symbolic_reward = SymbolicReward(spec)
        self._rewards: dict[str, Reward] = {name: build_matcher_reward(name) for name in MATCHERS}
        self._rewards[SYMBOLIC] = self._symbolic_reward
        self.kill_counts = self._symbolic_reward.kill_counts

    def validate_prompt(self, prompt: Prompt) -> None:
        self._rewards[find_kind(prompt.data_source)].validate_prompt(prompt)

    async def start(self) -> None:
        await self._symbolic_reward.start()

    async def close(self) -> None:
        await self._symbolic_reward.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        return await self._rewards[find_kind(prompt.data_source)].score(prompt, completions)


ENVIRONMENT_KIND = "environment"


class EnvironmentReward(Reward):
    """Takes the environment's score; PASS if it is above 0. The answer is the part's text.

    The rewards of turns fall on their turns.
    """

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        results = []
        for completion in completions:
            score = completion.environment_score
            if score is None:
                raise RewardError("no environment has scored the rollout: set environment.path")
            answer = completion.get_part(part).strip() or None
            result = RewardResult.from_correctness(score > 0, answer, score=score)
            turn_scores = completion.turn_rewards if any(completion.turn_rewards) else ()
            results.append(replace(result, turn_scores=turn_scores))
        return results
