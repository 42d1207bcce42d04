"""Compare our matchers for GSM8K, MATH and DAPO-math with verl's on a table of answers."""

from collections.abc import Callable, Sequence
from typing import Any

from verl.utils.reward_score import gsm8k, math_dapo, math_reward

from tests.parity.case import Answer, AnswerCase, OnPurpose
from tests.rewards.kinds.answers import ANSWERS, RULES

TABLE = [(completion, truth) for completion, truth, _ in ANSWERS]

BARE_TRUTH = "verl strips the answer only, so that nothing equals this truth"
FULL_STOP = "a right number is right at the end of a sentence or clause too"
COMMAS = "the thousands of a number are the same with commas, as in the strict method"
NO_NUMBER = "a comma without a digit is no number, so the one before it is the last"
FRAMED = r"without \boxed verl looks for \fbox, but then rejects it"
TWO_UNITS = "verl gives up on two units, and then spaces count"
BLANKS = "blanks at the edges of a box show nowhere"


def right_here(answers: Sequence[Answer], reason: str, *, wrong: float = 0.0) -> list[OnPurpose]:
    """Return answers that only our matcher scores as right."""
    return [OnPurpose(answer, 1.0, wrong, reason) for answer in answers]


GSM8K_STRICT = right_here(
    [("#### 1,234", "1,234"), ("#### 1234", "1,234"), ("#### 9", "9 ")], BARE_TRUTH
)
GSM8K_FLEXIBLE = [
    *right_here([("#### 1234", "1,234"), ("#### 9", "9 ")], BARE_TRUTH),
    *right_here(
        [
            ("#### 9.", "9"),
            ("The answer is 9.", "9"),
            ("The answer is 9, I think.", "9"),
            ("It is 9.\nWe are done, aren't we", "9"),
            ("Answer: 34.", "34"),
        ],
        FULL_STOP,
    ),
    *right_here(
        [
            ("#### 1,234", "1234"),
            ("It is 1,234.", "1234"),
            ("Answer: 1,234", "1234"),
            ("Answer: 1,234.5", "1234.5"),
            (r"\boxed{1,234}", "1234"),
        ],
        COMMAS,
    ),
    *right_here([("It is 1,234 , or so", "1234"), ("9 eggs ... ", "9")], NO_NUMBER),
]
MATH = [
    *right_here([(r"\fbox{34}", "34")], FRAMED),
    *right_here(
        [(r"\boxed{3\text{ red}, 2\text{ blue}}", r"3\text{ red},2\text{ blue}")], TWO_UNITS
    ),
]
DAPO_MATH = right_here([(r"\boxed{ 34 }", "34")], BLANKS, wrong=-1.0)


def ours(letter: str) -> Callable[[str, str], float]:
    """Return the score of one of our matchers."""
    return lambda completion, truth: RULES[letter](completion, truth).score


def theirs(function: Callable[..., Any], **options: Any) -> Callable[[str, str], float]:
    """Return the score of one of verl's, which may be in a dict."""

    def score(completion: str, truth: str) -> float:
        result = function(completion, truth, **options)
        return float(result["score"] if isinstance(result, dict) else result)

    return score


CASES = [
    AnswerCase(
        "gsm8k.judge, strict", "gsm8k", ours("s"), theirs(gsm8k.compute_score), GSM8K_STRICT
    ),
    AnswerCase(
        "gsm8k.judge, flexible",
        "gsm8k, flexible",
        ours("f"),
        theirs(gsm8k.compute_score, method="flexible"),
        GSM8K_FLEXIBLE,
    ),
    AnswerCase("boxed.judge", "math_reward", ours("m"), theirs(math_reward.compute_score), MATH),
    AnswerCase(
        "dapo_math.judge", "math_dapo", ours("d"), theirs(math_dapo.compute_score), DAPO_MATH
    ),
    AnswerCase(
        "dapo_math.judge, strict_box",
        "math_dapo, strict_box_verify",
        ours("b"),
        theirs(math_dapo.compute_score, strict_box_verify=True),
        DAPO_MATH,
    ),
]
