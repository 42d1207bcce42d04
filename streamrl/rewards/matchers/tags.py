"""Format matcher: checks tags such as <think>...</think><answer>...</answer>."""

import re
from collections.abc import Sequence

from streamrl.errors import ConfigError
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.matchers.matcher import GroundTruth, accept_any_truth

validate_truth = accept_any_truth


def judge_completion(
    completion: str,
    truth: GroundTruth = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
    nothing_outside: bool = True,
) -> RewardResult:
    """Score 1 if every tag is opened and closed once, in order and with content, else 0.

    nothing_outside: only whitespace is allowed outside the tags. Ignores the ground truth. Raises
    ConfigError unless `tags` is a nonempty list of distinct words.
    """
    are_words = all(re.fullmatch(r"[\w.-]+", tag) for tag in tags)
    if not are_words or len(set(tags)) != len(tags) or not tags:
        raise ConfigError(
            f"rewards.tags={list(tags)}: must be words (letters, digits and _ . -), each once,"
            " at least one"
        )
    detail = _find_format_error(completion, tags, nothing_outside=nothing_outside)
    return RewardResult.from_correctness(not detail, detail=detail)


def _find_format_error(completion: str, tags: Sequence[str], *, nothing_outside: bool) -> str:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    for mark in marks:
        if completion.count(mark) != 1:
            return f"{mark} {completion.count(mark)} times"
    if marks != sorted(marks, key=completion.index):
        return f"not in the order {' '.join(marks)}"
    rest = completion
    for tag in tags:
        outside, _, rest = rest.partition(f"<{tag}>")
        inside, _, rest = rest.partition(f"</{tag}>")
        if not inside.strip():
            return f"<{tag}> is empty"
        if nothing_outside and outside.strip():
            return f"text before <{tag}>"
    return f"text after </{tags[-1]}>" if nothing_outside and rest.strip() else ""
