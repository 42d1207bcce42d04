"""The rules by name, and the one that a data source is judged by."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from streamrl.errors import RewardError
from streamrl.rewards.matchers import (
    boxed,
    choice,
    dapo_math,
    gsm8k,
    length,
    symbolic,
    tags,
)
from streamrl.rewards.matchers.matcher import Rule

RULES: Mapping[str, Rule] = {
    "gsm8k": Rule(gsm8k.judge, gsm8k.check_truth),
    "math": Rule(boxed.judge, boxed.check_truth),
    "dapo_math": Rule(dapo_math.judge, dapo_math.check_truth),
    "symbolic": Rule(symbolic.judge, symbolic.check_truth, may_hang=True),
    "choice": Rule(choice.judge, choice.check_truth),
    "tags": Rule(tags.judge, tags.check_truth),
    "length": Rule(length.judge, length.check_truth),
}
#: Which of RULES a row is judged by whose data_source fits; * stands for any ending.
BY_SOURCE: Mapping[str, str] = {
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


def judge_for(data_source: str) -> Rule:
    """The rule of a data source. Raises RewardError, naming the source, if it has none."""
    for source, name in BY_SOURCE.items():
        if fnmatchcase(data_source, source):
            return RULES[name]
    raise RewardError(
        f"data_source {data_source!r} has no rule of its own; known: {', '.join(BY_SOURCE)}"
    )
