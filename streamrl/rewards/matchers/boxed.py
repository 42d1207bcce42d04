r"""MATH matcher: compares the last \boxed{} with the ground truth in normalized LaTeX.

Normal form of Hendrycks et al. 2021 (arXiv 2103.03874), scores of verl; docs/rewards_reference.md
lists the differences from verl.
"""

import re

from streamrl.errors import RewardError
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.matcher import (
    GroundTruth,
    make_missing_answer_result,
    parse_truth_text,
    require_nonempty,
)

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


def judge_completion(completion: str, truth: GroundTruth) -> RewardResult:
    r"""Score 1 if the last \boxed{} and the truth have the same normal form, else 0.

    Raises RewardError for an unusable truth.
    """
    expected = validate_truth(truth)
    box = find_last_box(completion)
    if box is None:
        return make_missing_answer_result("\\boxed{} that is closed")
    answer = normalize_latex(box)
    return RewardResult.from_correctness(answer == expected, answer)


def validate_truth(truth: GroundTruth) -> str:
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
