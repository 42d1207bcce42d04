"""Answer matchers by name, and the default matcher of each data_source."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from streamrl.errors import RewardError
from streamrl.rewards.matchers import boxed, choice, dapo_math, gsm8k, length, symbolic, tags
from streamrl.rewards.matchers.matcher import AnswerMatcher

MATCHERS: Mapping[str, AnswerMatcher] = {
    "gsm8k": AnswerMatcher(gsm8k.judge_completion, gsm8k.validate_truth),
    "math": AnswerMatcher(boxed.judge_completion, boxed.validate_truth),
    "dapo_math": AnswerMatcher(dapo_math.judge_completion, dapo_math.validate_truth),
    "symbolic": AnswerMatcher(symbolic.judge_completion, symbolic.validate_truth, may_hang=True),
    "choice": AnswerMatcher(choice.judge_completion, choice.validate_truth),
    "tags": AnswerMatcher(tags.judge_completion, tags.validate_truth),
    "length": AnswerMatcher(length.judge_completion, length.validate_truth),
}
#: Matcher by pattern of the row's data_source (fnmatch); the first matching pattern counts.
MATCHER_BY_SOURCE: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "dapo_math",
    "math_dapo": "dapo_math",
    "math_dapo_reasoning": "dapo_math",
    "aime*": "dapo_math",
    "numina_*": "symbolic",
}


def find_matcher(data_source: str) -> AnswerMatcher:
    """Return the default matcher of a data_source. Raises RewardError without a default."""
    for source, name in MATCHER_BY_SOURCE.items():
        if fnmatchcase(data_source, source):
            return MATCHERS[name]
    raise RewardError(
        f"data_source {data_source!r} has no default rule; known: {', '.join(MATCHER_BY_SOURCE)}"
    )
