r"""Matchers of mathematical answers: math, dapo_math, gsm8k; ground truths of symbolic.

math compares the last \boxed{} in normalized LaTeX: normal form of Hendrycks et al. 2021
(arXiv 2103.03874). dapo_math is the rule of Yu et al. 2025 (arXiv 2503.14476), with the normal form
of Lewkowycz et al. 2022 (Minerva, arXiv 2206.14858, appendix D). gsm8k compares the last number,
for the dataset of Cobbe et al. 2021 (arXiv 2110.14168). All three have the scores of verl;
docs/rewards_reference.md lists the differences.
"""

import re
from typing import Any

from streamrl.errors import RewardError
from streamrl.rewards.interface.answers import (
    make_missing_answer_result,
    parse_truth_text,
    require_nonempty,
)
from streamrl.user_code.reward_result import RewardResult

#: The order matters: later replacements see the result of earlier ones.
_REPLACEMENTS = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_UNIT = "\\text{ "
_ROOT = re.compile(r"\\sqrt([^{])")
_FRACTION = re.compile(r"\\frac([^{\\])(?:([^{\\])|(?=\{))")
_RATIO = re.compile(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))")
_BRACE = re.compile(r"[{}]")


def judge_math(completion: str, truth: Any) -> RewardResult:
    r"""Score 1 if the last \boxed{} and the truth have the same normal form, else 0.

    Raises RewardError for an unusable truth.
    """
    expected = validate_math_truth(truth)
    box = find_last_box(completion)
    if box is None:
        return make_missing_answer_result("\\boxed{} that is closed")
    answer = normalize_latex(box)
    return RewardResult.from_correctness(answer == expected, answer)


def validate_math_truth(truth: Any) -> str:
    """Return the truth in normal form. Raises RewardError if empty, no text, or a whole box."""
    text = parse_truth_text(truth)
    if "\\boxed" in text:
        raise RewardError(f"ground_truth must be the content of \\boxed{{}}, is {truth!r}")
    return require_nonempty(normalize_latex(text), truth)


def find_last_box(text: str) -> str | None:
    r"""Return the content of the last box; None without a box or with an unclosed last box.

    If a text has boxes in several notations, the first of these counts: \boxed without braces, up
    to the next $; \boxed{}; \fbox{}.
    """
    _, separator, rest = text.rpartition("\\boxed ")
    if separator:
        return rest.split("$", 1)[0]
    for command in ("\\boxed", "\\fbox"):
        _, separator, rest = text.rpartition(command)
        if separator:
            return extract_braced(rest)
    return None


def extract_braced(text: str) -> str | None:
    """Return the content of the braces at the start of a text; None without balanced braces."""
    depth = 0
    if text.startswith("{"):
        for brace in _BRACE.finditer(text):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[1 : brace.start()]
    return None


def normalize_latex(text: str) -> str:
    """Return the normal form of LaTeX, in which equivalent notations are equal text.

    docs/rewards_reference.md lists the steps.
    """
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    if text.count(_UNIT) == 1:  # several \text{ commands are a sentence, not a unit
        text = text.partition(_UNIT)[0]
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= len("x "):
        text = value
    text = _ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _FRACTION.sub(_add_braces, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return _RATIO.sub(r"\\frac{\1}{\2}", text) if _RATIO.fullmatch(text) else text


def _add_braces(fraction: re.Match[str]) -> str:
    numerator, denominator = fraction.groups()
    return f"\\frac{{{numerator}}}" + (f"{{{denominator}}}" if denominator else "")


#: Only the end of a completion counts, and for a box an even shorter end (as in verl).
WINDOW_CHARS = 300
BOX_WINDOW_CHARS = 100
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_BOX_START = "\\boxed{"
#: The order matters: articles, currency and "and" must go before the spaces.
_DAPO_REPLACEMENTS = (
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
_DAPO_FRACTION = re.compile(r"frac([^{\\])([^{\\])")
_DAPO_ROOT = re.compile(r"sqrt([^{\\])")


def judge_dapo_math(completion: str, truth: Any, *, strict_box: bool = False) -> RewardResult:
    r"""Score 1 or -1. The answer is the text after the last "Answer:", compared in normal form.

    Without "Answer:" the answer is the last \boxed{}, stripped and compared exactly. strict_box:
    ignore "Answer:". Raises RewardError.
    """
    expected = validate_dapo_math_truth(truth)
    lines = [] if strict_box else _ANSWER_LINE.findall(completion[-WINDOW_CHARS:])
    if lines:
        answer, expected = normalize_answer(lines[-1]), normalize_answer(expected)
    else:
        box = _find_dapo_box(completion[-BOX_WINDOW_CHARS:])
        if box is None:
            return make_missing_answer_result("Answer: and no \\boxed{} at the end", score=-1.0)
        answer = box.strip()
    right = answer == expected
    return RewardResult.from_correctness(right, answer, score=1.0 if right else -1.0)


def validate_dapo_math_truth(truth: Any) -> str:
    """Return the ground truth as it is written. Raises RewardError if its normal form is empty."""
    text = parse_truth_text(truth)
    require_nonempty(normalize_answer(text), truth)
    return text


def normalize_answer(text: str) -> str:
    """Return the normal form of an answer, by the steps in docs/rewards_reference.md."""
    text = text.rpartition("=")[2]
    for old, new in _DAPO_REPLACEMENTS:
        text = text.replace(old, new)
    for word in _REMOVED_WORDS:
        text = text.replace(word, "")
    before, _, maths = text.partition("$")
    maths, closed, _ = maths.partition("$")
    text = maths if closed else before + maths
    text = _BOXED.sub(r"\1", _STYLED_TEXT.sub(r"\1", text))
    text = _DAPO_ROOT.sub(r"sqrt{\1}", _DAPO_FRACTION.sub(r"frac{\1}{\2}", text))
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text


def _find_dapo_box(text: str) -> str | None:
    _, separator, rest = text.rpartition(_BOX_START)
    return extract_braced("{" + rest) if separator else None


GSM8K_METHODS = ("strict", "flexible")
_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def judge_gsm8k(completion: str, truth: Any, *, method: str = "strict") -> RewardResult:
    """Score 1 if the completion's number equals the truth as text without commas, else 0.

    method: strict takes the last number after "#### "; flexible takes the last number anywhere,
        without a trailing full stop. Raises RewardError for an unusable truth.
    """
    expected = validate_gsm8k_truth(truth)
    end = completion[-WINDOW_CHARS:]
    if method == "strict":
        numbers, missing = _MARKED_NUMBER.findall(end), "#### and a number"
    else:
        numbers, missing = [n for n in _NUMBER.findall(end) if _has_digit(n)], "number"
    if not numbers:
        return make_missing_answer_result(f"{missing} in the last {WINDOW_CHARS} characters")
    answer = numbers[-1].replace(",", "")
    if method == "flexible":
        answer, expected = answer.rstrip("."), expected.rstrip(".")
    return RewardResult.from_correctness(answer == expected, answer)


def validate_gsm8k_truth(truth: Any) -> str:
    """Return the ground truth without commas. Raises RewardError unless in decimal digits."""
    number = parse_truth_text(truth)
    if not _NUMBER.fullmatch(number) or not _has_digit(number):
        raise RewardError(f"ground_truth must be a number in decimal digits, is {truth!r}")
    return number.replace(",", "")


def _has_digit(number: str) -> bool:
    return any("0" <= character <= "9" for character in number)


MIN_PROSE_WORDS = 3
"""Words of a ground truth, LaTeX commands left out, from which it is prose. A unit is one word."""


def validate_symbolic_truth(truth: Any) -> str:
    """Return the truth as text. Raises RewardError for prose, too.

    math-verify reads words as products of their letters, to which no completion is equal.
    """
    text = parse_truth_text(truth)
    if len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)) >= MIN_PROSE_WORDS:
        raise RewardError(
            f"ground_truth is prose, which math-verify cannot compare: {text[:80]!r}; use kind"
            " exact, or judge"
        )
    return text
