"""DAPO-math matcher: 1 for the right answer at the end of a completion, else -1.

Rule of Yu et al. 2025 (arXiv 2503.14476), normal form of Lewkowycz et al. 2022 (Minerva,
arXiv 2206.14858, appendix D), scores of verl; docs/rewards_reference.md lists the differences.
"""

import re

from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.boxed import extract_braced
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    parse_truth_text,
    require_nonempty,
)

#: Only the end of a completion counts, and for a box an even shorter end (as in verl).
WINDOW_CHARS = 300
BOX_WINDOW_CHARS = 100
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_BOX_START = "\\boxed{"
#: The order matters: articles, currency and "and" must go before the spaces.
_REPLACEMENTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
#: The order matters. "childrentickets" (a missing comma) is in the paper and in verl.
_REMOVED_WORDS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    *("\\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *("\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}"),
    *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_STYLED_TEXT = re.compile(r"\\(?:text|textbf|overline)\{([^}]*)\}")
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_FRACTION = re.compile(r"frac([^{\\])([^{\\])")
_ROOT = re.compile(r"sqrt([^{\\])")


def judge_completion(
    completion: str, truth: GroundTruth, *, strict_box: bool = False
) -> RewardResult:
    r"""Score 1 or -1. The answer is the text after the last "Answer:", compared in normal form.

    Without "Answer:" the answer is the last \boxed{}, stripped and compared exactly. strict_box:
    ignore "Answer:". Raises RewardError.
    """
    expected = validate_truth(truth)
    lines = [] if strict_box else _ANSWER_LINE.findall(completion[-WINDOW_CHARS:])
    if lines:
        answer, expected = normalize_answer(lines[-1]), normalize_answer(expected)
    else:
        box = _find_last_box(completion[-BOX_WINDOW_CHARS:])
        if box is None:
            return make_missing_answer_result("Answer: and no \\boxed{} at the end", score=-1.0)
        answer = box.strip()
    right = answer == expected
    return RewardResult.from_correctness(right, answer, score=1.0 if right else -1.0)


def validate_truth(truth: GroundTruth) -> str:
    """Return the ground truth as it is written. Raises RewardError if its normal form is empty."""
    text = parse_truth_text(truth)
    require_nonempty(normalize_answer(text), truth)
    return text


def normalize_answer(text: str) -> str:
    """Return the normal form of an answer, by the steps in docs/rewards_reference.md."""
    text = text.rpartition("=")[2]
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    for word in _REMOVED_WORDS:
        text = text.replace(word, "")
    before, _, maths = text.partition("$")
    maths, closed, _ = maths.partition("$")
    text = maths if closed else before + maths
    text = _BOXED.sub(r"\1", _STYLED_TEXT.sub(r"\1", text))
    text = _ROOT.sub(r"sqrt{\1}", _FRACTION.sub(r"frac{\1}{\2}", text))
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text


def _find_last_box(text: str) -> str | None:
    _, separator, rest = text.rpartition(_BOX_START)
    return extract_braced("{" + rest) if separator else None
